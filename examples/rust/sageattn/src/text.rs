//! Text and numbers from C.

use std::ffi::CStr;
use std::os::raw::c_char;

/// # Safety
/// `text` must end with NUL.
pub(crate) unsafe fn from_ptr(text: *const c_char) -> String {
    CStr::from_ptr(text).to_string_lossy().into_owned()
}

/// A field of a struct of C as a field of a struct here.
pub(crate) trait FromC<T> {
    fn from_c(value: T) -> Self;
}

impl<T> FromC<T> for T {
    fn from_c(value: T) -> T {
        value
    }
}

/// Up to its NUL.
impl<const N: usize> FromC<[c_char; N]> for String {
    fn from_c(value: [c_char; N]) -> String {
        let bytes: Vec<u8> = value.iter().map(|&c| c as u8).take_while(|&c| c != 0).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// A struct with fields of a struct of C, by the same names.
macro_rules! mirror {
    ($(#[$doc:meta])* $name:ident of $c:ident {
        $($(#[$field_doc:meta])* $field:ident: $type:ty,)+
    }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq)]
        #[non_exhaustive]
        pub struct $name { $($(#[$field_doc])* pub $field: $type,)+ }

        impl From<crate::sys::$c> for $name {
            fn from(c: crate::sys::$c) -> Self {
                Self { $($field: crate::text::FromC::from_c(c.$field),)+ }
            }
        }
    };
}
pub(crate) use mirror;
