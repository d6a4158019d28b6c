// SPDX-License-Identifier: Apache-2.0

package sageattn

// #include <sageattn.h>
import "C"

import "fmt"

// The constants of sageattn.h, whose comments say what each means. Zero is the default of every
// type that has one. Their values are the header's own, so they cannot drift from the library.

// A Backend says who computes.
type Backend int32

const (
	BackendAuto Backend = C.SAGEATTN_BACKEND_AUTO
	BackendCUDA Backend = C.SAGEATTN_BACKEND_CUDA
	BackendCPU  Backend = C.SAGEATTN_BACKEND_CPU
)

// ContextFlags are or-ed.
type ContextFlags uint32

const (
	NoJIT         ContextFlags = C.SAGEATTN_CONTEXT_NO_JIT
	NoDiskCache   ContextFlags = C.SAGEATTN_CONTEXT_NO_DISK_CACHE
	CacheReadOnly ContextFlags = C.SAGEATTN_CONTEXT_CACHE_READ_ONLY
)

// A LogLevel is the level of a log message.
type LogLevel int32

const (
	LogInfo    LogLevel = C.SAGEATTN_LOG_INFO
	LogWarning LogLevel = C.SAGEATTN_LOG_WARNING
)

// A Preset is a named set of numerics, for NewAttnDesc.
type Preset int32

const (
	PresetAuto     Preset = C.SAGEATTN_PRESET_AUTO
	PresetSage1    Preset = C.SAGEATTN_PRESET_SAGE1
	PresetSage2_8B Preset = C.SAGEATTN_PRESET_SAGE2_8B
	PresetSage2_4B Preset = C.SAGEATTN_PRESET_SAGE2_4B
	PresetSage2PP  Preset = C.SAGEATTN_PRESET_SAGE2PP
	PresetExact    Preset = C.SAGEATTN_PRESET_EXACT
)

// A DType is the element type of a tensor.
type DType int32

const (
	F16  DType = C.SAGEATTN_F16
	BF16 DType = C.SAGEATTN_BF16
	F32  DType = C.SAGEATTN_F32
)

// A Layout is the order in memory of a tensor without strides.
type Layout int32

const (
	LayoutNHD Layout = C.SAGEATTN_LAYOUT_NHD
	LayoutHND Layout = C.SAGEATTN_LAYOUT_HND
)

// A BatchMode says how sequences lie in a tensor.
type BatchMode int32

const (
	BatchDense  BatchMode = C.SAGEATTN_BATCH_DENSE
	BatchVarlen BatchMode = C.SAGEATTN_BATCH_VARLEN
)

// A Mask says which keys a query sees.
type Mask int32

const (
	MaskNone              Mask = C.SAGEATTN_MASK_NONE
	MaskCausalBottomRight Mask = C.SAGEATTN_MASK_CAUSAL_BOTTOM_RIGHT
	MaskCausalTopLeft     Mask = C.SAGEATTN_MASK_CAUSAL_TOP_LEFT
	MaskWindow            Mask = C.SAGEATTN_MASK_WINDOW
)

// A QKFormat is the format of Q and K in the product of both.
type QKFormat int32

const (
	QKAuto QKFormat = C.SAGEATTN_QK_AUTO
	QKI8   QKFormat = C.SAGEATTN_QK_I8
	QKI4   QKFormat = C.SAGEATTN_QK_I4
	QKNone QKFormat = C.SAGEATTN_QK_NONE
	QKE4M3 QKFormat = C.SAGEATTN_QK_E4M3
)

// A Granularity says which elements of Q, and of K, share a scale.
type Granularity int32

const (
	GranularityAuto      Granularity = C.SAGEATTN_GRANULARITY_AUTO
	GranularityPerThread Granularity = C.SAGEATTN_GRANULARITY_PER_THREAD
	GranularityPerWarp   Granularity = C.SAGEATTN_GRANULARITY_PER_WARP
	GranularityPerBlock  Granularity = C.SAGEATTN_GRANULARITY_PER_BLOCK
	GranularityPerToken  Granularity = C.SAGEATTN_GRANULARITY_PER_TOKEN
	GranularityPerTensor Granularity = C.SAGEATTN_GRANULARITY_PER_TENSOR
)

// A Smooth says whether the mean of Q or K is subtracted before quantization.
type Smooth int32

const (
	SmoothAuto Smooth = C.SAGEATTN_SMOOTH_AUTO
	SmoothOn   Smooth = C.SAGEATTN_SMOOTH_ON
	SmoothOff  Smooth = C.SAGEATTN_SMOOTH_OFF
)

// A SmoothV says which mean of V is subtracted before quantization.
type SmoothV int32

const (
	SmoothVAuto     SmoothV = C.SAGEATTN_SMOOTH_V_AUTO
	SmoothVOff      SmoothV = C.SAGEATTN_SMOOTH_V_OFF
	SmoothVSequence SmoothV = C.SAGEATTN_SMOOTH_V_SEQUENCE
	SmoothVGroup    SmoothV = C.SAGEATTN_SMOOTH_V_GROUP
)

// A VScale says which elements of V share a scale.
type VScale int32

const (
	VScaleAuto    VScale = C.SAGEATTN_V_SCALE_AUTO
	VScaleChannel VScale = C.SAGEATTN_V_SCALE_CHANNEL
	VScaleGroup   VScale = C.SAGEATTN_V_SCALE_GROUP
)

// A Rotation is a change of basis of Q and K before quantization.
type Rotation int32

const (
	RotationNone       Rotation = C.SAGEATTN_ROTATION_NONE
	RotationHadamard   Rotation = C.SAGEATTN_ROTATION_HADAMARD
	RotationSmoothAttn Rotation = C.SAGEATTN_ROTATION_SMOOTHATTN
)

// A PVFormat is the format of P and V in the product of both.
type PVFormat int32

const (
	PVAuto PVFormat = C.SAGEATTN_PV_AUTO
	PVE4M3 PVFormat = C.SAGEATTN_PV_E4M3
	PVF16  PVFormat = C.SAGEATTN_PV_F16
	PVNone PVFormat = C.SAGEATTN_PV_NONE
	PVE5M2 PVFormat = C.SAGEATTN_PV_E5M2
	PVI8   PVFormat = C.SAGEATTN_PV_I8
)

// A RowSum says what the sum that normalises the output adds up.
type RowSum int32

const (
	RowSumAuto     RowSum = C.SAGEATTN_ROW_SUM_AUTO
	RowSumP        RowSum = C.SAGEATTN_ROW_SUM_P
	RowSumRoundedP RowSum = C.SAGEATTN_ROW_SUM_ROUNDED_P
)

// A PVAccum says how the products of P and V are accumulated.
type PVAccum int32

const (
	PVAccumAuto        PVAccum = C.SAGEATTN_PV_ACCUM_AUTO
	PVAccumTwoLevel    PVAccum = C.SAGEATTN_PV_ACCUM_TWO_LEVEL
	PVAccumF16         PVAccum = C.SAGEATTN_PV_ACCUM_F16
	PVAccumF32         PVAccum = C.SAGEATTN_PV_ACCUM_F32
	PVAccumSingleLevel PVAccum = C.SAGEATTN_PV_ACCUM_SINGLE_LEVEL
)

// A Kernel is a family of kernels.
type Kernel int32

const (
	KernelAuto    Kernel = C.SAGEATTN_KERNEL_AUTO
	KernelMMASync Kernel = C.SAGEATTN_KERNEL_MMA_SYNC
	KernelWGMMA   Kernel = C.SAGEATTN_KERNEL_WGMMA
)

// A PVModel is a model of FP8 accumulation in the CPU backend.
type PVModel int32

const (
	PVModelAuto   PVModel = C.SAGEATTN_PV_MODEL_AUTO
	PVModelQMMA13 PVModel = C.SAGEATTN_PV_MODEL_QMMA13
	PVModelHMMA   PVModel = C.SAGEATTN_PV_MODEL_HMMA
)

// An Origin says where a plan's kernels came from.
type Origin int32

const (
	OriginBuiltin  Origin = C.SAGEATTN_ORIGIN_BUILTIN
	OriginMemory   Origin = C.SAGEATTN_ORIGIN_MEMORY
	OriginBlob     Origin = C.SAGEATTN_ORIGIN_BLOB
	OriginDisk     Origin = C.SAGEATTN_ORIGIN_DISK
	OriginCompiled Origin = C.SAGEATTN_ORIGIN_COMPILED
)

// Words of Args.Status, one for each sequence.
const (
	SequenceOK         int32 = C.SAGEATTN_SEQUENCE_OK
	SequenceBadLengths int32 = C.SAGEATTN_SEQUENCE_BAD_LENGTHS
)

// String is the name of the type, for example "F16".
func (d DType) String() string {
	switch d {
	case F16:
		return "F16"
	case BF16:
		return "BF16"
	case F32:
		return "F32"
	}
	return fmt.Sprintf("DType(%d)", int32(d))
}
