use crate::error::{check, load};
use crate::{
    sys, BatchMode, Dtype, Error, Granularity, Kernel, Layout, Mask, Preset, PvAccum, PvFormat,
    PvModel, QkFormat, Rotation, RowSum, Smooth, SmoothV, VScale,
};

/// What a plan computes, and the limits of every execute: a preset's numerics, changed and
/// completed by the methods, which are named after the fields of `sageattn_attn_desc`.
#[derive(Clone)]
pub struct AttnDesc(sys::sageattn_attn_desc);

macro_rules! setters {
    ($($(#[$doc:meta])* $field:ident: $type:ty,)+) => {$(
        $(#[$doc])*
        #[must_use]
        pub fn $field(mut self, value: $type) -> Self {
            self.0.$field = Number::number(value);
            self
        }
    )+};
}

/// What a field holds: the number itself or an enumeration's.
trait Number<T> {
    fn number(self) -> T;
}

macro_rules! numbers {
    ($($name:ident)+) => {$(
        impl Number<i32> for $name {
            fn number(self) -> i32 {
                self.0
            }
        }
    )+};
}

numbers! {
    BatchMode Dtype Granularity Kernel Layout Mask PvAccum PvFormat PvModel QkFormat Rotation RowSum
    Smooth SmoothV VScale
}

impl<T> Number<T> for T {
    fn number(self) -> T {
        self
    }
}

impl AttnDesc {
    pub fn new(preset: Preset) -> Result<AttnDesc, Error> {
        load()?;
        let mut desc = sys::sageattn_attn_desc::default();
        let size = desc.struct_size;
        // SAFETY: desc has that size.
        check(|error| unsafe { sys::sageattn_attn_desc_init(&mut desc, size, preset.0, error) })?;
        Ok(AttnDesc(desc))
    }

    setters! {
        /// Required.
        q_dtype: Dtype,
        /// Of k and v. Default: q_dtype.
        kv_dtype: Dtype,
        /// Default: q_dtype.
        out_dtype: Dtype,
        layout: Layout,
        batch_mode: BatchMode,
        mask: Mask,
        /// Required: 1..256.
        head_dim: i32,
        /// Channels of v and out. Default: head_dim.
        head_dim_v: i32,
        /// Required.
        num_qo_heads: i32,
        /// Divides num_qo_heads, which is the default.
        num_kv_heads: i32,
        /// Sequences an execute. Default: 1.
        max_batch: i32,
        /// Required: queries a sequence.
        max_qo_len: i32,
        /// Required: keys a sequence.
        max_kv_len: i32,
        /// Packed queries. Default: max_batch * max_qo_len.
        max_total_qo: i64,
        /// Packed keys. Default: max_batch * max_kv_len.
        max_total_kv: i64,
        qk_format: QkFormat,
        qk_granularity: Granularity,
        smooth_q: Smooth,
        smooth_k: Smooth,
        smooth_v: SmoothV,
        v_scale: VScale,
        rotation: Rotation,
        pv_format: PvFormat,
        row_sum: RowSum,
        pv_accum: PvAccum,
        promotion_interval: i32,
        kernel: Kernel,
        pv_model: PvModel,
    }

    /// Default: 1 / sqrt(head_dim).
    #[must_use]
    pub fn sm_scale(mut self, sm_scale: f32) -> Self {
        self.0.sm_scale_set = 1;
        self.0.sm_scale = sm_scale;
        self
    }

    /// [`Mask::WINDOW`] with this many keys before and after the diagonal; -1 for all.
    #[must_use]
    pub fn window(mut self, left: i32, right: i32) -> Self {
        self.0.window_left = left;
        self.0.window_right = right;
        self.mask(Mask::WINDOW)
    }

    pub(crate) fn c(&self) -> &sys::sageattn_attn_desc {
        &self.0
    }
}
