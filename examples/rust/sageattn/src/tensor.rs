use std::marker::PhantomData;
use std::os::raw::c_void;

use crate::error::invalid;
use crate::{sys, Dtype, Error};

/// A type of elements that the library knows.
///
/// # Safety
/// Its representation is that of `DTYPE`, and every pattern of bits is a value.
pub unsafe trait Element: Copy {
    const DTYPE: Dtype;
}

// SAFETY: float is IEEE 754's binary32.
unsafe impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;
}

/// Bits of an IEEE 754 binary16, e.g. of a `half::f16`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct F16(pub u16);

// SAFETY: the same bits.
unsafe impl Element for F16 {
    const DTYPE: Dtype = Dtype::F16;
}

/// Bits of a bfloat16: the upper half of a float's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Bf16(pub u16);

// SAFETY: the same bits.
unsafe impl Element for Bf16 {
    const DTYPE: Dtype = Dtype::BF16;
}

impl Bf16 {
    /// Rounds to nearest even.
    pub fn from_f32(value: f32) -> Bf16 {
        let bits = value.to_bits();
        if value.is_nan() {
            return Bf16((bits >> 16) as u16 | 0x40); // rounded up it might become an infinity
        }
        Bf16(((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16)
    }

    pub fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }
}

/// Distances in elements, of any sign, from the first element of a tensor. All zero: contiguous, in
/// the plan's layout and with the lengths of the call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Strides {
    pub batch: i64,
    pub token: i64,
    pub head: i64,
    pub dim: i64,
}

/// A tensor to read: a slice as a whole, or a part of it.
#[derive(Clone, Copy)]
pub struct Input<'a> {
    data: *const c_void,
    place: Place,
    _data: PhantomData<&'a ()>,
}

/// A tensor to write: a slice as a whole, or a part of it.
pub struct Output<'a> {
    data: *mut c_void,
    place: Place,
    _data: PhantomData<&'a mut ()>,
}

/// Where to write the log-sum-exp. Its strides have no `dim`.
pub struct Lse<'a>(Output<'a>);

impl<'a> Input<'a> {
    /// A tensor whose first element is `slice[offset]`.
    pub fn strided<T: Element>(slice: &'a [T], offset: usize, strides: Strides) -> Self {
        let place = Place { dtype: T::DTYPE, len: slice.len(), offset, strides };
        // Wrapping: whether the element is there is known when the lengths are.
        let data = slice.as_ptr().wrapping_add(offset).cast();
        Input { data, place, _data: PhantomData }
    }

    pub(crate) fn check(
        &self,
        name: &str,
        dtype: Dtype,
        shape: &Sizes,
    ) -> Result<sys::sageattn_const_tensor, Error> {
        self.place.check(name, dtype, shape)?;
        let Strides { batch, token, head, dim } = self.place.strides;
        Ok(sys::sageattn_const_tensor {
            data: self.data,
            stride_batch: batch,
            stride_token: token,
            stride_head: head,
            stride_dim: dim,
        })
    }

    pub(crate) fn dtype(&self) -> Dtype {
        self.place.dtype
    }
}

impl<'a> Output<'a> {
    /// A tensor whose first element is `slice[offset]`.
    pub fn strided<T: Element>(slice: &'a mut [T], offset: usize, strides: Strides) -> Self {
        let place = Place { dtype: T::DTYPE, len: slice.len(), offset, strides };
        let data = slice.as_mut_ptr().wrapping_add(offset).cast();
        Output { data, place, _data: PhantomData }
    }

    pub(crate) fn check(
        &self,
        name: &str,
        dtype: Dtype,
        shape: &Sizes,
    ) -> Result<sys::sageattn_tensor, Error> {
        self.place.check(name, dtype, shape)?;
        let Strides { batch, token, head, dim } = self.place.strides;
        Ok(sys::sageattn_tensor {
            data: self.data,
            stride_batch: batch,
            stride_token: token,
            stride_head: head,
            stride_dim: dim,
        })
    }
}

impl<'a> Lse<'a> {
    /// An LSE whose first element is `slice[offset]`; `strides.dim` must be 0.
    pub fn strided(slice: &'a mut [f32], offset: usize, strides: Strides) -> Self {
        Lse(Output::strided(slice, offset, strides))
    }

    pub(crate) fn check(&self, shape: &Sizes) -> Result<sys::sageattn_lse_tensor, Error> {
        let Strides { batch, token, head, dim } = self.0.place.strides;
        if dim != 0 {
            return Err(invalid(format!(
                "lse: strides.dim = {dim}: must be 0, it has no channels"
            )));
        }
        self.0.place.check("lse", Dtype::F32, &Sizes { dim: 1, ..*shape })?;
        Ok(sys::sageattn_lse_tensor {
            data: self.0.data.cast(),
            stride_batch: batch,
            stride_head: head,
            stride_token: token,
        })
    }
}

impl<'a, T: Element> From<&'a [T]> for Input<'a> {
    fn from(slice: &'a [T]) -> Self {
        Input::strided(slice, 0, Strides::default())
    }
}

impl<'a, T: Element> From<&'a Vec<T>> for Input<'a> {
    fn from(vec: &'a Vec<T>) -> Self {
        vec.as_slice().into()
    }
}

impl<'a, T: Element> From<&'a mut [T]> for Output<'a> {
    fn from(slice: &'a mut [T]) -> Self {
        Output::strided(slice, 0, Strides::default())
    }
}

impl<'a, T: Element> From<&'a mut Vec<T>> for Output<'a> {
    fn from(vec: &'a mut Vec<T>) -> Self {
        vec.as_mut_slice().into()
    }
}

impl<'a> From<&'a mut [f32]> for Lse<'a> {
    fn from(slice: &'a mut [f32]) -> Self {
        Lse::strided(slice, 0, Strides::default())
    }
}

impl<'a> From<&'a mut Vec<f32>> for Lse<'a> {
    fn from(vec: &'a mut Vec<f32>) -> Self {
        vec.as_mut_slice().into()
    }
}

/// What a tensor must hold. A negative size is none: the library refuses it.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub batch: i64,
    pub len: i64,
    pub heads: i64,
    pub dim: i64,
}

/// Where the elements of a tensor lie in a slice of `len`.
#[derive(Clone, Copy)]
struct Place {
    dtype: Dtype,
    len: usize,
    offset: usize,
    strides: Strides,
}

impl Place {
    /// Refuses a tensor of another type, and one that reaches out of its slice.
    fn check(&self, name: &str, dtype: Dtype, shape: &Sizes) -> Result<(), Error> {
        if self.dtype != dtype {
            return Err(invalid(format!(
                "{name}: elements are {:?}: must be {dtype:?}, as the plan says",
                self.dtype
            )));
        }
        let sizes = [shape.batch, shape.len, shape.heads, shape.dim];
        if sizes.iter().any(|&size| size <= 0) {
            return Ok(());
        }
        let given = [self.strides.batch, self.strides.token, self.strides.head, self.strides.dim];
        // 128 bits: nothing here overflows, however large lengths and strides are.
        let (mut first, mut last) = (self.offset as i128, self.offset as i128);
        if given == [0; 4] {
            last += sizes.iter().map(|&size| i128::from(size)).product::<i128>() - 1;
        } else {
            for (size, stride) in sizes.iter().zip(given) {
                let reach = i128::from(size - 1) * i128::from(stride);
                first += reach.min(0);
                last += reach.max(0);
            }
        }
        if first < 0 || last >= self.len as i128 {
            return Err(invalid(format!(
                "{name}: its elements are {first}..={last} of the slice, which has {}: batch {}, \
                 len {}, heads {}, channels {}, offset {}, {:?}",
                self.len, sizes[0], sizes[1], sizes[2], sizes[3], self.offset, self.strides
            )));
        }
        Ok(())
    }
}
