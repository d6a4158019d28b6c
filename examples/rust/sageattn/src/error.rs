use std::fmt;

use crate::text::FromC;
use crate::{sys, Status};

/// Why a call failed: a status to act on, and a message that names the function, the field, its
/// value and what is allowed.
#[derive(Clone, PartialEq, Eq)]
pub struct Error {
    status: Status,
    message: String,
}

impl Error {
    pub(crate) fn new(status: Status, message: impl Into<String>) -> Error {
        Error { status, message: message.into() }
    }

    pub fn status(&self) -> Status {
        self.status
    }

    pub fn message(&self) -> &str {
        &self.message
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}: {}", self.status, self.message)
    }
}

/// As it is displayed: what a `main` that returns it prints.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Error {}

pub(crate) fn invalid(message: impl Into<String>) -> Error {
    Error::new(Status::E_INVALID_ARGUMENT, message)
}

/// What every function calls before its first call of the library.
pub(crate) fn load() -> Result<(), Error> {
    sys::load().map_err(|why| Error::new(Status::NOT_LOADED, why))
}

/// Calls a function of the library, whose last argument is given.
pub(crate) fn check(call: impl FnOnce(*mut sys::sageattn_error) -> i32) -> Result<(), Error> {
    let mut error = sys::sageattn_error::default();
    match call(&mut error) {
        sys::SAGEATTN_OK => Ok(()),
        status => Err(Error::new(Status(status), String::from_c(error.message))),
    }
}

/// Calls a function that fills a buffer of a size that it knows.
pub(crate) fn fill(
    call: impl Fn(*mut u8, usize, *mut usize, *mut sys::sageattn_error) -> i32,
) -> Result<Vec<u8>, Error> {
    let mut buffer = Vec::new();
    loop {
        let mut needed = 0;
        match check(|error| call(buffer.as_mut_ptr(), buffer.len(), &mut needed, error)) {
            // Again, should another thread have added to it meanwhile.
            Err(error) if error.status == Status::E_BUFFER_TOO_SMALL => buffer.resize(needed, 0),
            Err(error) => return Err(error),
            Ok(()) => {
                buffer.truncate(needed);
                return Ok(buffer);
            }
        }
    }
}
