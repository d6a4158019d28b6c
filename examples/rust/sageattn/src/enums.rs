//! The enumerations of `sageattn.h`, each a type, with its constants less their common prefix.
//!
//! They are numbers, not Rust enums: a newer library may return a value that is not known here.

use std::fmt;

use crate::sys;
use crate::text::FromC;

macro_rules! enumerations {
    ($($(#[$doc:meta])* $name:ident { $($value:ident = $constant:ident,)+ })+) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
        #[repr(transparent)]
        pub struct $name(pub i32);

        impl $name {
            $(
                #[doc = concat!("`", stringify!($constant), "`")]
                pub const $value: $name = $name(sys::$constant);
            )+

            /// The name of the constant in C, if it is known here.
            pub fn c_name(self) -> Option<&'static str> {
                match self {
                    $($name::$value => Some(stringify!($constant)),)+
                    _ => None,
                }
            }
        }

        impl FromC<i32> for $name {
            fn from_c(value: i32) -> Self {
                $name(value)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
                match self.c_name() {
                    Some(name) => f.write_str(name),
                    None => write!(f, "{}({})", stringify!($name), self.0),
                }
            }
        }
    )+};
}

enumerations! {
    /// The status of a call.
    Status {
        OK = SAGEATTN_OK,
        E_INVALID_ARGUMENT = SAGEATTN_E_INVALID_ARGUMENT,
        E_UNKNOWN_FIELD = SAGEATTN_E_UNKNOWN_FIELD,
        E_MISALIGNED = SAGEATTN_E_MISALIGNED,
        E_ALIASED = SAGEATTN_E_ALIASED,
        E_LIMIT = SAGEATTN_E_LIMIT,
        E_WORKSPACE = SAGEATTN_E_WORKSPACE,
        E_BUFFER_TOO_SMALL = SAGEATTN_E_BUFFER_TOO_SMALL,
        E_UNSUPPORTED = SAGEATTN_E_UNSUPPORTED,
        E_NO_DEVICE = SAGEATTN_E_NO_DEVICE,
        E_DRIVER_TOO_OLD = SAGEATTN_E_DRIVER_TOO_OLD,
        E_NVRTC_NOT_FOUND = SAGEATTN_E_NVRTC_NOT_FOUND,
        E_NVRTC_TOO_OLD = SAGEATTN_E_NVRTC_TOO_OLD,
        E_KERNEL_MISSING = SAGEATTN_E_KERNEL_MISSING,
        E_BAD_BLOB = SAGEATTN_E_BAD_BLOB,
        E_OUT_OF_MEMORY = SAGEATTN_E_OUT_OF_MEMORY,
        E_CUDA = SAGEATTN_E_CUDA,
        E_COMPILE = SAGEATTN_E_COMPILE,
        E_SELFTEST = SAGEATTN_E_SELFTEST,
        E_INTERNAL = SAGEATTN_E_INTERNAL,
    }

    /// Who computes.
    Backend {
        AUTO = SAGEATTN_BACKEND_AUTO,
        CUDA = SAGEATTN_BACKEND_CUDA,
        CPU = SAGEATTN_BACKEND_CPU,
    }

    /// Level of a line of the log.
    LogLevel {
        INFO = SAGEATTN_LOG_INFO,
        WARNING = SAGEATTN_LOG_WARNING,
    }

    /// A named set of numerics.
    Preset {
        AUTO = SAGEATTN_PRESET_AUTO,
        SAGE1 = SAGEATTN_PRESET_SAGE1,
        SAGE2_8B = SAGEATTN_PRESET_SAGE2_8B,
        SAGE2_4B = SAGEATTN_PRESET_SAGE2_4B,
        SAGE2PP = SAGEATTN_PRESET_SAGE2PP,
        EXACT = SAGEATTN_PRESET_EXACT,
    }

    /// Element type of a tensor. The default, 0, stands for the type that the field says.
    Dtype {
        F16 = SAGEATTN_F16,
        BF16 = SAGEATTN_BF16,
        F32 = SAGEATTN_F32,
    }

    /// What a tensor without strides means.
    Layout {
        NHD = SAGEATTN_LAYOUT_NHD,
        HND = SAGEATTN_LAYOUT_HND,
    }

    /// Whether sequences are equally long or packed.
    BatchMode {
        DENSE = SAGEATTN_BATCH_DENSE,
        VARLEN = SAGEATTN_BATCH_VARLEN,
    }

    /// Which keys a query sees.
    Mask {
        NONE = SAGEATTN_MASK_NONE,
        CAUSAL_BOTTOM_RIGHT = SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT,
        CAUSAL_TOP_LEFT = SAGEATTN_MASK_CAUSAL_TOP_LEFT,
        WINDOW = SAGEATTN_MASK_WINDOW,
    }

    /// Format of Q and K in the product Q K^T.
    QkFormat {
        AUTO = SAGEATTN_QK_AUTO,
        I8 = SAGEATTN_QK_I8,
        I4 = SAGEATTN_QK_I4,
        NONE = SAGEATTN_QK_NONE,
        E4M3 = SAGEATTN_QK_E4M3,
    }

    /// Which elements of Q, and of K, share a scale.
    Granularity {
        AUTO = SAGEATTN_GRANULARITY_AUTO,
        PER_THREAD = SAGEATTN_GRANULARITY_PER_THREAD,
        PER_WARP = SAGEATTN_GRANULARITY_PER_WARP,
        PER_BLOCK = SAGEATTN_GRANULARITY_PER_BLOCK,
        PER_TOKEN = SAGEATTN_GRANULARITY_PER_TOKEN,
        PER_TENSOR = SAGEATTN_GRANULARITY_PER_TENSOR,
    }

    /// Whether the mean is subtracted from Q or K.
    Smooth {
        AUTO = SAGEATTN_SMOOTH_AUTO,
        ON = SAGEATTN_SMOOTH_ON,
        OFF = SAGEATTN_SMOOTH_OFF,
    }

    /// Which mean is subtracted from V.
    SmoothV {
        AUTO = SAGEATTN_SMOOTH_V_AUTO,
        OFF = SAGEATTN_SMOOTH_V_OFF,
        SEQUENCE = SAGEATTN_SMOOTH_V_SEQUENCE,
        GROUP = SAGEATTN_SMOOTH_V_GROUP,
    }

    /// Which elements of V share a scale.
    VScale {
        AUTO = SAGEATTN_V_SCALE_AUTO,
        CHANNEL = SAGEATTN_V_SCALE_CHANNEL,
        GROUP = SAGEATTN_V_SCALE_GROUP,
    }

    /// Change of basis of Q and K.
    Rotation {
        NONE = SAGEATTN_ROTATION_NONE,
        HADAMARD = SAGEATTN_ROTATION_HADAMARD,
        SMOOTHATTN = SAGEATTN_ROTATION_SMOOTHATTN,
    }

    /// Format of P and V in the product P V.
    PvFormat {
        AUTO = SAGEATTN_PV_AUTO,
        E4M3 = SAGEATTN_PV_E4M3,
        F16 = SAGEATTN_PV_F16,
        NONE = SAGEATTN_PV_NONE,
        E5M2 = SAGEATTN_PV_E5M2,
        I8 = SAGEATTN_PV_I8,
    }

    /// What the row sum adds up.
    RowSum {
        AUTO = SAGEATTN_ROW_SUM_AUTO,
        P = SAGEATTN_ROW_SUM_P,
        ROUNDED_P = SAGEATTN_ROW_SUM_ROUNDED_P,
    }

    /// How the products P V are accumulated.
    PvAccum {
        AUTO = SAGEATTN_PV_ACCUM_AUTO,
        TWO_LEVEL = SAGEATTN_PV_ACCUM_TWO_LEVEL,
        F16 = SAGEATTN_PV_ACCUM_F16,
        F32 = SAGEATTN_PV_ACCUM_F32,
        SINGLE_LEVEL = SAGEATTN_PV_ACCUM_SINGLE_LEVEL,
    }

    /// Which kernel family computes or is emulated.
    Kernel {
        AUTO = SAGEATTN_KERNEL_AUTO,
        MMA_SYNC = SAGEATTN_KERNEL_MMA_SYNC,
        WGMMA = SAGEATTN_KERNEL_WGMMA,
    }

    /// Model of FP8 accumulation in the CPU backend.
    PvModel {
        AUTO = SAGEATTN_PV_MODEL_AUTO,
        QMMA13 = SAGEATTN_PV_MODEL_QMMA13,
        HMMA = SAGEATTN_PV_MODEL_HMMA,
    }

    /// Where a plan's kernels came from.
    Origin {
        BUILTIN = SAGEATTN_ORIGIN_BUILTIN,
        MEMORY = SAGEATTN_ORIGIN_MEMORY,
        BLOB = SAGEATTN_ORIGIN_BLOB,
        DISK = SAGEATTN_ORIGIN_DISK,
        COMPILED = SAGEATTN_ORIGIN_COMPILED,
    }

    /// What an execute says of a sequence.
    SequenceStatus {
        OK = SAGEATTN_SEQUENCE_OK,
        BAD_LENGTHS = SAGEATTN_SEQUENCE_BAD_LENGTHS,
    }
}

impl Status {
    /// Of this crate alone: the library could not be loaded (feature `dlopen`).
    pub const NOT_LOADED: Status = Status(-1);
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match *self {
            Status::NOT_LOADED => f.write_str("library not loaded"),
            _ => fmt::Debug::fmt(self, f),
        }
    }
}

/// Or-ed into [`crate::ContextDesc::flags`].
pub mod context_flags {
    use crate::sys;

    pub const NO_JIT: u32 = sys::SAGEATTN_CONTEXT_NO_JIT as u32;
    pub const NO_DISK_CACHE: u32 = sys::SAGEATTN_CONTEXT_NO_DISK_CACHE as u32;
    pub const CACHE_READ_ONLY: u32 = sys::SAGEATTN_CONTEXT_CACHE_READ_ONLY as u32;
}
