//! Loads libsageattn at run time. It is never unloaded: its threads may outlive any owner here.

use std::ffi::{CStr, CString};
use std::os::raw::{c_char, c_int, c_void};
use std::ptr::{null_mut, NonNull};
use std::sync::atomic::{AtomicPtr, Ordering};

extern "C" {
    fn dlopen(file: *const c_char, mode: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
    fn dlerror() -> *const c_char;
}
const RTLD_NOW: c_int = 2;

pub(crate) struct Library(NonNull<c_void>);

impl Library {
    fn open() -> Result<Library, String> {
        let file = std::env::var("SAGEATTN_LIBRARY").unwrap_or_else(|_| "libsageattn.so.0".into());
        let c_file = CString::new(file.as_str()).map_err(|_| "SAGEATTN_LIBRARY holds a NUL")?;
        // SAFETY: a string that ends with NUL. What is loaded is as trusted as the program itself.
        let library = unsafe { dlopen(c_file.as_ptr(), RTLD_NOW) };
        let why = || format!("cannot load {file} ($SAGEATTN_LIBRARY names another): {}", error());
        NonNull::new(library).map(Library).ok_or_else(why)
    }

    /// Where a function starts; `name` ends with NUL.
    pub(crate) fn function(&self, name: &str) -> Result<NonNull<c_void>, String> {
        // SAFETY: as above.
        let function = unsafe { dlsym(self.0.as_ptr(), name.as_ptr().cast()) };
        NonNull::new(function).ok_or_else(error)
    }
}

/// Why the last call failed on this thread.
fn error() -> String {
    // SAFETY: called after a failure, when it is a string that ends with NUL.
    unsafe { CStr::from_ptr(dlerror()) }.to_string_lossy().into_owned()
}

/// A value that is made from the library by the first who asks; a failure is tried again.
pub(crate) struct Once<T: 'static>(AtomicPtr<T>);

impl<T> Once<T> {
    pub(crate) const fn new() -> Self {
        Once(AtomicPtr::new(null_mut()))
    }

    pub(crate) fn get(
        &self,
        make: impl FnOnce(&Library) -> Result<T, String>,
    ) -> Result<&'static T, String> {
        let mut value = self.0.load(Ordering::Acquire);
        if value.is_null() {
            // Two threads at once make the same; the one that is late leaves its copy unused.
            value = Box::into_raw(Box::new(make(&Library::open()?)?));
            self.0.store(value, Ordering::Release);
        }
        // SAFETY: made above or by another thread, and never freed.
        Ok(unsafe { &*value })
    }
}
