// SPDX-License-Identifier: Apache-2.0

package sageattn

// #include "shim.h"
import "C"

import "unsafe"

// CompareArgs are two tensors to compare, of shape [Batch, Len, NumHeads, HeadDim].
type CompareArgs struct {
	Layout                        Layout
	Batch, Len, NumHeads, HeadDim int
	Out                           Tensor // what is judged
	Ref                           Tensor // what it should be
}

// A CompareResult holds metrics over all elements, and the worst over the heads.
type CompareResult struct {
	WorstHead     int32 // of WorstCosSim: batch index * heads + head
	Count         int64 // elements compared
	NonfiniteOut  int64 // NaN or Inf in Out: look at these first
	NonfiniteRef  int64
	CosSim        float64
	RelL1         float64
	RMSE          float64
	RelError      float64
	MaxAbsError   float64
	WorstCosSim   float64
	WorstRelL1    float64
	WorstRMSE     float64
	WorstRelError float64
}

// Compare compares two tensors.
func Compare(args CompareArgs) (CompareResult, error) {
	const function = "Compare"
	var c C.sageattn_compare_args
	c.struct_size = C.uint32_t(unsafe.Sizeof(c))
	c.out_dtype = C.int32_t(args.Out.dtype)
	c.ref_dtype = C.int32_t(args.Ref.dtype)
	c.layout = C.int32_t(args.Layout)
	for _, field := range []struct {
		name  string
		value int
		to    *C.int32_t
	}{{"Batch", args.Batch, &c.batch}, {"Len", args.Len, &c.len}, {"NumHeads", args.NumHeads, &c.num_heads},
		{"HeadDim", args.HeadDim, &c.head_dim}} {
		if err := setLength(function, field.name, field.value, field.to); err != nil {
			return CompareResult{}, err
		}
	}
	sizes := [4]int{args.Batch, args.Len, args.NumHeads, args.HeadDim}
	out, err := args.Out.locate(function, "Out", sizes)
	if err != nil {
		return CompareResult{}, err
	}
	ref, err := args.Ref.locate(function, "Ref", sizes)
	if err != nil {
		return CompareResult{}, err
	}
	c.out = C.sageattn_const_tensor(args.Out.Strides.c())
	c.ref = C.sageattn_const_tensor(args.Ref.Strides.c())
	var metrics C.sageattn_compare_result
	metrics.struct_size = C.uint32_t(unsafe.Sizeof(metrics))
	r := newResult()
	if err := r.err(C.sageattn_go_compare(&c, out, ref, &metrics, &r.c)); err != nil {
		return CompareResult{}, err
	}
	return compareResult(&metrics), nil
}

func compareResult(c *C.sageattn_compare_result) CompareResult {
	return CompareResult{
		WorstHead:     int32(c.worst_head),
		Count:         int64(c.count),
		NonfiniteOut:  int64(c.nonfinite_out),
		NonfiniteRef:  int64(c.nonfinite_ref),
		CosSim:        float64(c.cos_sim),
		RelL1:         float64(c.rel_l1),
		RMSE:          float64(c.rmse),
		RelError:      float64(c.rel_error),
		MaxAbsError:   float64(c.max_abs_error),
		WorstCosSim:   float64(c.worst_cos_sim),
		WorstRelL1:    float64(c.worst_rel_l1),
		WorstRMSE:     float64(c.worst_rmse),
		WorstRelError: float64(c.worst_rel_error),
	}
}
