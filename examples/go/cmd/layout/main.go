// SPDX-License-Identifier: Apache-2.0

// Layout prints every constant of this package by its name in sageattn.h ("const NAME VALUE"), and
// size and fields of every struct as Go has them ("struct NAME SIZE", "field STRUCT NAME OFFSET
// SIZE"), to be held against the header.
package main

// #include <sageattn.h>
import "C"

import (
	"fmt"
	"reflect"

	"sageattn"
)

var constants = []struct {
	name  string
	value int64
}{
	{"SAGEATTN_OK", int64(sageattn.OK)},
	{"SAGEATTN_E_INVALID_ARGUMENT", int64(sageattn.ErrInvalidArgument)},
	{"SAGEATTN_E_UNKNOWN_FIELD", int64(sageattn.ErrUnknownField)},
	{"SAGEATTN_E_MISALIGNED", int64(sageattn.ErrMisaligned)},
	{"SAGEATTN_E_ALIASED", int64(sageattn.ErrAliased)},
	{"SAGEATTN_E_LIMIT", int64(sageattn.ErrLimit)},
	{"SAGEATTN_E_WORKSPACE", int64(sageattn.ErrWorkspace)},
	{"SAGEATTN_E_BUFFER_TOO_SMALL", int64(sageattn.ErrBufferTooSmall)},
	{"SAGEATTN_E_UNSUPPORTED", int64(sageattn.ErrUnsupported)},
	{"SAGEATTN_E_NO_DEVICE", int64(sageattn.ErrNoDevice)},
	{"SAGEATTN_E_DRIVER_TOO_OLD", int64(sageattn.ErrDriverTooOld)},
	{"SAGEATTN_E_NVRTC_NOT_FOUND", int64(sageattn.ErrNVRTCNotFound)},
	{"SAGEATTN_E_NVRTC_TOO_OLD", int64(sageattn.ErrNVRTCTooOld)},
	{"SAGEATTN_E_KERNEL_MISSING", int64(sageattn.ErrKernelMissing)},
	{"SAGEATTN_E_BAD_BLOB", int64(sageattn.ErrBadBlob)},
	{"SAGEATTN_E_OUT_OF_MEMORY", int64(sageattn.ErrOutOfMemory)},
	{"SAGEATTN_E_CUDA", int64(sageattn.ErrCUDA)},
	{"SAGEATTN_E_COMPILE", int64(sageattn.ErrCompile)},
	{"SAGEATTN_E_SELFTEST", int64(sageattn.ErrSelfTest)},
	{"SAGEATTN_E_INTERNAL", int64(sageattn.ErrInternal)},
	{"SAGEATTN_CONTEXT_NO_JIT", int64(sageattn.NoJIT)},
	{"SAGEATTN_CONTEXT_NO_DISK_CACHE", int64(sageattn.NoDiskCache)},
	{"SAGEATTN_CONTEXT_CACHE_READ_ONLY", int64(sageattn.CacheReadOnly)},
	{"SAGEATTN_BACKEND_AUTO", int64(sageattn.BackendAuto)},
	{"SAGEATTN_BACKEND_CUDA", int64(sageattn.BackendCUDA)},
	{"SAGEATTN_BACKEND_CPU", int64(sageattn.BackendCPU)},
	{"SAGEATTN_LOG_INFO", int64(sageattn.LogInfo)},
	{"SAGEATTN_LOG_WARNING", int64(sageattn.LogWarning)},
	{"SAGEATTN_PRESET_AUTO", int64(sageattn.PresetAuto)},
	{"SAGEATTN_PRESET_SAGE1", int64(sageattn.PresetSage1)},
	{"SAGEATTN_PRESET_SAGE2_8B", int64(sageattn.PresetSage2_8B)},
	{"SAGEATTN_PRESET_SAGE2_4B", int64(sageattn.PresetSage2_4B)},
	{"SAGEATTN_PRESET_SAGE2PP", int64(sageattn.PresetSage2PP)},
	{"SAGEATTN_PRESET_EXACT", int64(sageattn.PresetExact)},
	{"SAGEATTN_F16", int64(sageattn.F16)},
	{"SAGEATTN_BF16", int64(sageattn.BF16)},
	{"SAGEATTN_F32", int64(sageattn.F32)},
	{"SAGEATTN_LAYOUT_NHD", int64(sageattn.LayoutNHD)},
	{"SAGEATTN_LAYOUT_HND", int64(sageattn.LayoutHND)},
	{"SAGEATTN_BATCH_DENSE", int64(sageattn.BatchDense)},
	{"SAGEATTN_BATCH_VARLEN", int64(sageattn.BatchVarlen)},
	{"SAGEATTN_MASK_NONE", int64(sageattn.MaskNone)},
	{"SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT", int64(sageattn.MaskCausalBottomRight)},
	{"SAGEATTN_MASK_CAUSAL_TOP_LEFT", int64(sageattn.MaskCausalTopLeft)},
	{"SAGEATTN_MASK_WINDOW", int64(sageattn.MaskWindow)},
	{"SAGEATTN_QK_AUTO", int64(sageattn.QKAuto)},
	{"SAGEATTN_QK_I8", int64(sageattn.QKI8)},
	{"SAGEATTN_QK_I4", int64(sageattn.QKI4)},
	{"SAGEATTN_QK_NONE", int64(sageattn.QKNone)},
	{"SAGEATTN_QK_E4M3", int64(sageattn.QKE4M3)},
	{"SAGEATTN_GRANULARITY_AUTO", int64(sageattn.GranularityAuto)},
	{"SAGEATTN_GRANULARITY_PER_THREAD", int64(sageattn.GranularityPerThread)},
	{"SAGEATTN_GRANULARITY_PER_WARP", int64(sageattn.GranularityPerWarp)},
	{"SAGEATTN_GRANULARITY_PER_BLOCK", int64(sageattn.GranularityPerBlock)},
	{"SAGEATTN_GRANULARITY_PER_TOKEN", int64(sageattn.GranularityPerToken)},
	{"SAGEATTN_GRANULARITY_PER_TENSOR", int64(sageattn.GranularityPerTensor)},
	{"SAGEATTN_SMOOTH_AUTO", int64(sageattn.SmoothAuto)},
	{"SAGEATTN_SMOOTH_ON", int64(sageattn.SmoothOn)},
	{"SAGEATTN_SMOOTH_OFF", int64(sageattn.SmoothOff)},
	{"SAGEATTN_SMOOTH_V_AUTO", int64(sageattn.SmoothVAuto)},
	{"SAGEATTN_SMOOTH_V_OFF", int64(sageattn.SmoothVOff)},
	{"SAGEATTN_SMOOTH_V_SEQUENCE", int64(sageattn.SmoothVSequence)},
	{"SAGEATTN_SMOOTH_V_GROUP", int64(sageattn.SmoothVGroup)},
	{"SAGEATTN_V_SCALE_AUTO", int64(sageattn.VScaleAuto)},
	{"SAGEATTN_V_SCALE_CHANNEL", int64(sageattn.VScaleChannel)},
	{"SAGEATTN_V_SCALE_GROUP", int64(sageattn.VScaleGroup)},
	{"SAGEATTN_ROTATION_NONE", int64(sageattn.RotationNone)},
	{"SAGEATTN_ROTATION_HADAMARD", int64(sageattn.RotationHadamard)},
	{"SAGEATTN_ROTATION_SMOOTHATTN", int64(sageattn.RotationSmoothAttn)},
	{"SAGEATTN_PV_AUTO", int64(sageattn.PVAuto)},
	{"SAGEATTN_PV_E4M3", int64(sageattn.PVE4M3)},
	{"SAGEATTN_PV_F16", int64(sageattn.PVF16)},
	{"SAGEATTN_PV_NONE", int64(sageattn.PVNone)},
	{"SAGEATTN_PV_E5M2", int64(sageattn.PVE5M2)},
	{"SAGEATTN_PV_I8", int64(sageattn.PVI8)},
	{"SAGEATTN_ROW_SUM_AUTO", int64(sageattn.RowSumAuto)},
	{"SAGEATTN_ROW_SUM_P", int64(sageattn.RowSumP)},
	{"SAGEATTN_ROW_SUM_ROUNDED_P", int64(sageattn.RowSumRoundedP)},
	{"SAGEATTN_PV_ACCUM_AUTO", int64(sageattn.PVAccumAuto)},
	{"SAGEATTN_PV_ACCUM_TWO_LEVEL", int64(sageattn.PVAccumTwoLevel)},
	{"SAGEATTN_PV_ACCUM_F16", int64(sageattn.PVAccumF16)},
	{"SAGEATTN_PV_ACCUM_F32", int64(sageattn.PVAccumF32)},
	{"SAGEATTN_PV_ACCUM_SINGLE_LEVEL", int64(sageattn.PVAccumSingleLevel)},
	{"SAGEATTN_KERNEL_AUTO", int64(sageattn.KernelAuto)},
	{"SAGEATTN_KERNEL_MMA_SYNC", int64(sageattn.KernelMMASync)},
	{"SAGEATTN_KERNEL_WGMMA", int64(sageattn.KernelWGMMA)},
	{"SAGEATTN_PV_MODEL_AUTO", int64(sageattn.PVModelAuto)},
	{"SAGEATTN_PV_MODEL_QMMA13", int64(sageattn.PVModelQMMA13)},
	{"SAGEATTN_PV_MODEL_HMMA", int64(sageattn.PVModelHMMA)},
	{"SAGEATTN_ORIGIN_BUILTIN", int64(sageattn.OriginBuiltin)},
	{"SAGEATTN_ORIGIN_MEMORY", int64(sageattn.OriginMemory)},
	{"SAGEATTN_ORIGIN_BLOB", int64(sageattn.OriginBlob)},
	{"SAGEATTN_ORIGIN_DISK", int64(sageattn.OriginDisk)},
	{"SAGEATTN_ORIGIN_COMPILED", int64(sageattn.OriginCompiled)},
	{"SAGEATTN_SEQUENCE_OK", int64(sageattn.SequenceOK)},
	{"SAGEATTN_SEQUENCE_BAD_LENGTHS", int64(sageattn.SequenceBadLengths)},
}

var structs = []struct {
	name  string
	value any
}{
	{"sageattn_error", C.sageattn_error{}},
	{"sageattn_context_desc", C.sageattn_context_desc{}},
	{"sageattn_attn_desc", C.sageattn_attn_desc{}},
	{"sageattn_plan_info", C.sageattn_plan_info{}},
	{"sageattn_kernel_info", C.sageattn_kernel_info{}},
	{"sageattn_const_tensor", C.sageattn_const_tensor{}},
	{"sageattn_tensor", C.sageattn_tensor{}},
	{"sageattn_lse_tensor", C.sageattn_lse_tensor{}},
	{"sageattn_execute_args", C.sageattn_execute_args{}},
	{"sageattn_compare_args", C.sageattn_compare_args{}},
	{"sageattn_compare_result", C.sageattn_compare_result{}},
}

func main() {
	for _, c := range constants {
		fmt.Println("const", c.name, c.value)
	}
	for _, s := range structs {
		t := reflect.TypeOf(s.value)
		fmt.Println("struct", s.name, t.Size())
		for i := 0; i < t.NumField(); i++ {
			if f := t.Field(i); f.Name != "_" { // padding
				fmt.Println("field", s.name, f.Name, f.Offset, f.Type.Size())
			}
		}
	}
}
