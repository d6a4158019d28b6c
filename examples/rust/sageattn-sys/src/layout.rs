//! What a check of this binding against the header compares.

pub use crate::header::{structs, CONSTANTS};

/// A struct by its C name, with its size and its fields in bytes.
pub struct Struct {
    pub name: &'static str,
    pub size: usize,
    pub fields: Vec<Field>,
}

pub struct Field {
    pub name: &'static str,
    pub offset: usize,
    pub size: usize,
}

pub(crate) fn field<S, T>(name: &'static str, base: *const S, field: *const T) -> Field {
    // A field whose name is a word of Rust has a prefix here.
    let name = name.strip_prefix("r#").unwrap_or(name);
    Field { name, offset: field as usize - base as usize, size: std::mem::size_of::<T>() }
}
