// SPDX-License-Identifier: Apache-2.0

package sageattn

// #include "shim.h"
import "C"

import (
	"math"
	"unsafe"
)

// Strides are in elements, of any sign. All zero: contiguous, in the plan's layout and with the
// lengths of the call. Otherwise each counts as given.
type Strides struct{ Batch, Token, Head, Dim int64 }

// LSEStrides are the strides of a log-sum-exp. All zero: [batch, head, token].
type LSEStrides struct{ Batch, Head, Token int64 }

// A Tensor is a slice of numbers seen as [batch, token, head, channel]. The slice may be of Go's
// memory or of a Buffer's; it is not copied.
type Tensor struct {
	// Strides, and Offset, the index in the slice of element [0, 0, 0, 0], say how a tensor lies that
	// is not contiguous or does not begin with the slice.
	Strides Strides
	Offset  int

	data   unsafe.Pointer
	length int
	dtype  DType
}

// Float32s is a tensor of F32.
func Float32s(s []float32) Tensor { return Tensor{data: address(s), length: len(s), dtype: F32} }

// Float16s is a tensor of F16, as bits.
func Float16s(s []uint16) Tensor { return Tensor{data: address(s), length: len(s), dtype: F16} }

// BFloat16s is a tensor of BF16, as bits.
func BFloat16s(s []uint16) Tensor { return Tensor{data: address(s), length: len(s), dtype: BF16} }

// At is the tensor with strides, its element [0, 0, 0, 0] at index offset of the slice.
func (t Tensor) At(offset int, strides Strides) Tensor {
	t.Offset, t.Strides = offset, strides
	return t
}

// locate is where element [0, 0, 0, 0] is, if all elements of the sizes are within the slice: C
// would read and write whatever lies beyond it.
func (t *Tensor) locate(function, name string, sizes [4]int) (unsafe.Pointer, error) {
	elementSize := 2
	if t.dtype == F32 {
		elementSize = 4
	}
	s := t.Strides
	strides := []int64{s.Batch, s.Token, s.Head, s.Dim}
	if err := checkReach(function, name, sizes[:], strides, t.Offset, t.length); err != nil {
		return nil, err
	}
	for _, size := range sizes {
		if size == 0 {
			return nil, nil // without elements there is no first one to point at
		}
	}
	return unsafe.Add(t.data, t.Offset*elementSize), nil
}

// checkReach fails unless every element of the sizes is one of a slice's. No size is negative.
func checkReach(function, name string, sizes []int, strides []int64, offset, length int) error {
	if offset < 0 || offset > length {
		return newError(ErrInvalidArgument, "%s: %s: Offset is %d, but must be within the slice, 0..%d",
			function, name, offset, length)
	}
	contiguous := true
	for i, size := range sizes {
		if size == 0 {
			return nil // no element at all
		}
		contiguous = contiguous && strides[i] == 0
	}
	lowest, highest := int64(offset), int64(offset)
	if contiguous {
		count := int64(1)
		for _, size := range sizes {
			count = multiply(count, int64(size))
		}
		highest = add(highest, count-1)
	} else {
		for i, size := range sizes {
			if span := multiply(int64(size-1), strides[i]); span < 0 {
				lowest = add(lowest, span)
			} else {
				highest = add(highest, span)
			}
		}
	}
	if lowest < 0 || highest >= int64(length) {
		return newError(ErrInvalidArgument,
			"%s: %s: sizes %v with strides %v reach from index %d to %d of the slice, which has %d elements",
			function, name, sizes, strides, lowest, highest, length)
	}
	return nil
}

// multiply and add stop at the ends of the range, which no slice reaches. a >= 0.
func multiply(a, b int64) int64 {
	switch {
	case a == 0 || b == 0:
		return 0
	case b > math.MaxInt64/a:
		return math.MaxInt64
	case b < -math.MaxInt64/a:
		return -math.MaxInt64
	}
	return a * b
}

func add(a, b int64) int64 {
	switch {
	case b > 0 && a > math.MaxInt64-b:
		return math.MaxInt64
	case b < 0 && a < -math.MaxInt64-b:
		return -math.MaxInt64
	}
	return a + b
}

func setLength(function, name string, value int, to *C.int32_t) error {
	if value < 0 || value > math.MaxInt32 {
		return newError(ErrInvalidArgument, "%s: %s is %d, but must be 0..%d", function, name, value,
			math.MaxInt32)
	}
	*to = C.int32_t(value)
	return nil
}

func (s Strides) c() C.sageattn_tensor {
	return C.sageattn_tensor{nil, C.int64_t(s.Batch), C.int64_t(s.Token), C.int64_t(s.Head), C.int64_t(s.Dim)}
}

func (s LSEStrides) c() C.sageattn_lse_tensor {
	return C.sageattn_lse_tensor{nil, C.int64_t(s.Batch), C.int64_t(s.Head), C.int64_t(s.Token)}
}
