//! Quantized attention (SageAttention) by libsageattn, safely.
//!
//! A [`Context`] is made once, a [`Plan`] once for a kind of attention ([`AttnDesc`]), and then
//! [`Plan::execute`] computes as often as you like on slices in host memory, with a [`Workspace`]
//! for each execute in flight; `examples/quickstart.rs` is a whole program. With the CUDA backend
//! [`Plan::execute_raw`] takes device pointers.
//!
//! Names and numbers are those of `sageattn.h`, which is the manual; [`sys`] has all of it. The
//! features `link` and `dlopen` are explained there.

mod compare;
mod context;
mod desc;
mod enums;
mod error;
mod plan;
mod tensor;
mod text;

pub use compare::{compare, CompareResult, Shape};
pub use context::{Context, ContextDesc, Log};
pub use desc::AttnDesc;
pub use enums::*;
pub use error::Error;
pub use plan::{Args, KernelInfo, Plan, PlanInfo, Workspace};
pub use sageattn_sys as sys;
pub use tensor::{Bf16, Element, Input, Lse, Output, Strides, F16};

/// The library's version, e.g. "0.1.0".
pub fn version() -> Result<String, Error> {
    error::load()?;
    // SAFETY: a string in static storage.
    Ok(unsafe { text::from_ptr(sys::sageattn_version_string()) })
}

/// Hex digest of the sources that the library was built from.
pub fn source_id() -> Result<String, Error> {
    error::load()?;
    // SAFETY: as above.
    Ok(unsafe { text::from_ptr(sys::sageattn_source_id()) })
}
