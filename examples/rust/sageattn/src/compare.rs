use crate::error::{check, load};
use crate::tensor::Sizes;
use crate::text::mirror;
use crate::{sys, Error, Input, Layout};

/// Shape of two tensors to compare.
#[derive(Clone, Copy, Debug, Default)]
pub struct Shape {
    pub layout: Layout,
    pub batch: i32,
    pub len: i32,
    pub num_heads: i32,
    pub head_dim: i32,
}

mirror! {
    /// Metrics over all elements, and the worst over the heads. Non-finite elements are counted and
    /// left out of the sums, so look at the counts first.
    CompareResult of sageattn_compare_result {
        worst_head: i32,
        count: i64,
        nonfinite_out: i64,
        nonfinite_ref: i64,
        cos_sim: f64,
        rel_l1: f64,
        rmse: f64,
        rel_error: f64,
        max_abs_error: f64,
        worst_cos_sim: f64,
        worst_rel_l1: f64,
        worst_rmse: f64,
        worst_rel_error: f64,
    }
}

/// Compares `out` with what it should be.
pub fn compare<'a>(
    shape: Shape,
    out: impl Into<Input<'a>>,
    reference: impl Into<Input<'a>>,
) -> Result<CompareResult, Error> {
    load()?;
    let (out, reference) = (out.into(), reference.into());
    let sizes = Sizes {
        batch: shape.batch.into(),
        len: shape.len.into(),
        heads: shape.num_heads.into(),
        dim: shape.head_dim.into(),
    };
    let args = sys::sageattn_compare_args {
        out_dtype: out.dtype().0,
        ref_dtype: reference.dtype().0,
        layout: shape.layout.0,
        batch: shape.batch,
        len: shape.len,
        num_heads: shape.num_heads,
        head_dim: shape.head_dim,
        out: out.check("out", out.dtype(), &sizes)?,
        r#ref: reference.check("ref", reference.dtype(), &sizes)?,
        ..Default::default()
    };
    let mut result = sys::sageattn_compare_result::default();
    // SAFETY: both tensors lie in their slices.
    check(|error| unsafe { sys::sageattn_compare(&args, &mut result, error) })?;
    Ok(result.into())
}
