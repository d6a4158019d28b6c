//! The C API of libsageattn, as it is. The header `sageattn.h` is its manual; the crate `sageattn`
//! wraps it safely.
//!
//! Two features offer the same functions:
//!
//! - `link` (default) names the library to the linker, so that the program needs it to start.
//!   It is looked for in `SAGEATTN_LIB_DIR`, else where pkg-config says, else where the linker
//!   looks by itself.
//! - `dlopen` loads it when [`load`] is called or a function is used for the first time: the file
//!   that `SAGEATTN_LIBRARY` names, else `libsageattn.so.0` as the loader finds it. It wins if both
//!   are on.
//!
//! `Default` of a struct is zeros, with `struct_size` set where there is one.

#![allow(non_camel_case_types)]

#[cfg(not(any(feature = "link", feature = "dlopen")))]
compile_error!("sageattn-sys needs one of its features `link` and `dlopen`");

#[macro_use]
mod macros;
#[cfg(feature = "dlopen")]
mod dynamic;
mod header;
pub mod layout;

pub use header::*;

/// Loads the library, or says why that failed. Without the feature `dlopen` it is there already.
/// With it, a function that is called before panics where this would have returned an error.
pub fn load() -> Result<(), String> {
    #[cfg(feature = "dlopen")]
    header::table()?;
    Ok(())
}
