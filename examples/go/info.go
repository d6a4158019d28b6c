// SPDX-License-Identifier: Apache-2.0

package sageattn

// #include <sageattn.h>
import "C"

// A PlanInfo says what a plan is: every AUTO as it was resolved, 0 where a field does not apply.
type PlanInfo struct {
	Backend Backend
	Arch    int32 // what runs or is emulated
	Origin  Origin

	MinWorkspace       int64 // bytes that an execute needs
	PreferredWorkspace int64 // bytes from which on it is fastest
	WorkspaceAlignment int32

	Registers  int32 // a thread of the attention kernel
	SpillBytes int32
	SmemBytes  int32
	Threads    int32
	Launches   int32 // kernel launches an execute
	CompileMS  float32

	BQ                int32 // queries a tile
	BK                int32 // keys a tile
	PromotionInterval int32

	QDType        DType
	KVDType       DType
	OutDType      DType
	HeadDimV      int32
	NumKVHeads    int32
	SMScale       float32
	QKFormat      QKFormat
	QKGranularity Granularity
	SmoothQ       Smooth
	SmoothK       Smooth
	SmoothV       SmoothV
	VScale        VScale
	Rotation      Rotation
	PVFormat      PVFormat
	RowSum        RowSum
	PVAccum       PVAccum
	Kernel        Kernel
	PVModel       PVModel
	KernelName    string
	NumKernels    int32 // that Plan.Kernel tells of
}

func planInfo(c *C.sageattn_plan_info) PlanInfo {
	return PlanInfo{
		Backend:            Backend(c.backend),
		Arch:               int32(c.arch),
		Origin:             Origin(c.origin),
		MinWorkspace:       int64(c.min_workspace),
		PreferredWorkspace: int64(c.preferred_workspace),
		WorkspaceAlignment: int32(c.workspace_alignment),
		Registers:          int32(c.registers),
		SpillBytes:         int32(c.spill_bytes),
		SmemBytes:          int32(c.smem_bytes),
		Threads:            int32(c.threads),
		Launches:           int32(c.launches),
		CompileMS:          float32(c.compile_ms),
		BQ:                 int32(c.b_q),
		BK:                 int32(c.b_k),
		PromotionInterval:  int32(c.promotion_interval),
		QDType:             DType(c.q_dtype),
		KVDType:            DType(c.kv_dtype),
		OutDType:           DType(c.out_dtype),
		HeadDimV:           int32(c.head_dim_v),
		NumKVHeads:         int32(c.num_kv_heads),
		SMScale:            float32(c.sm_scale),
		QKFormat:           QKFormat(c.qk_format),
		QKGranularity:      Granularity(c.qk_granularity),
		SmoothQ:            Smooth(c.smooth_q),
		SmoothK:            Smooth(c.smooth_k),
		SmoothV:            SmoothV(c.smooth_v),
		VScale:             VScale(c.v_scale),
		Rotation:           Rotation(c.rotation),
		PVFormat:           PVFormat(c.pv_format),
		RowSum:             RowSum(c.row_sum),
		PVAccum:            PVAccum(c.pv_accum),
		Kernel:             Kernel(c.kernel),
		PVModel:            PVModel(c.pv_model),
		KernelName:         C.GoString(&c.kernel_name[0]),
		NumKernels:         int32(c.num_kernels),
	}
}

// A KernelInfo is one kernel of a plan, compiled.
type KernelInfo struct {
	Arch       int32 // what it is compiled for
	Origin     Origin
	Registers  int32 // a thread
	SpillBytes int32 // a thread
	SmemBytes  int32 // a block
	Threads    int32 // a block
	CompileMS  float32
	Name       string
	Macros     string // how it is specialised
}

func kernelInfo(c *C.sageattn_kernel_info) KernelInfo {
	return KernelInfo{
		Arch:       int32(c.arch),
		Origin:     Origin(c.origin),
		Registers:  int32(c.registers),
		SpillBytes: int32(c.spill_bytes),
		SmemBytes:  int32(c.smem_bytes),
		Threads:    int32(c.threads),
		CompileMS:  float32(c.compile_ms),
		Name:       C.GoString(&c.name[0]),
		Macros:     C.GoString(&c.macros[0]),
	}
}
