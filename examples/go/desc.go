// SPDX-License-Identifier: Apache-2.0

package sageattn

// #include <sageattn.h>
import "C"

import "unsafe"

// An AttnDesc says what a plan computes. Start from NewAttnDesc, then set types, heads and limits.
// What sageattn.h reserves for later (bias, sinks, KV storage, softcap) has no field.
type AttnDesc struct {
	QDType    DType // required
	KVDType   DType // of k and v; 0: QDType
	OutDType  DType // 0: QDType
	Layout    Layout
	BatchMode BatchMode

	Mask        Mask
	WindowLeft  int32 // MaskWindow: keys before the diagonal; -1: all
	WindowRight int32 // MaskWindow: keys after the diagonal; -1: all

	HeadDim    int32 // required: 1..256
	HeadDimV   int32 // 0: HeadDim
	NumQoHeads int32 // required
	NumKVHeads int32 // divides NumQoHeads; 0: NumQoHeads

	SMScaleSet bool // false: 1 / sqrt(HeadDim)
	SMScale    float32

	MaxBatch   int32 // 0: 1
	MaxQoLen   int32 // required
	MaxKVLen   int32 // required
	MaxTotalQo int64 // BatchVarlen; 0: MaxBatch * MaxQoLen
	MaxTotalKV int64 // BatchVarlen; 0: MaxBatch * MaxKVLen

	QKFormat          QKFormat
	QKGranularity     Granularity
	SmoothQ           Smooth
	SmoothK           Smooth
	SmoothV           SmoothV
	VScale            VScale
	Rotation          Rotation
	PVFormat          PVFormat
	RowSum            RowSum
	PVAccum           PVAccum
	PromotionInterval int32 // keys
	Kernel            Kernel
	PVModel           PVModel
}

// NewAttnDesc is a desc with the numerics of a preset.
func NewAttnDesc(preset Preset) (AttnDesc, error) {
	var c C.sageattn_attn_desc
	r := newResult()
	size := C.uint32_t(unsafe.Sizeof(c))
	if err := r.err(C.sageattn_attn_desc_init(&c, size, C.int32_t(preset), &r.c)); err != nil {
		return AttnDesc{}, err
	}
	d := AttnDesc{
		QDType:            DType(c.q_dtype),
		KVDType:           DType(c.kv_dtype),
		OutDType:          DType(c.out_dtype),
		Layout:            Layout(c.layout),
		BatchMode:         BatchMode(c.batch_mode),
		Mask:              Mask(c.mask),
		WindowLeft:        int32(c.window_left),
		WindowRight:       int32(c.window_right),
		HeadDim:           int32(c.head_dim),
		HeadDimV:          int32(c.head_dim_v),
		NumQoHeads:        int32(c.num_qo_heads),
		NumKVHeads:        int32(c.num_kv_heads),
		SMScaleSet:        c.sm_scale_set != 0,
		SMScale:           float32(c.sm_scale),
		MaxBatch:          int32(c.max_batch),
		MaxQoLen:          int32(c.max_qo_len),
		MaxKVLen:          int32(c.max_kv_len),
		MaxTotalQo:        int64(c.max_total_qo),
		MaxTotalKV:        int64(c.max_total_kv),
		QKFormat:          QKFormat(c.qk_format),
		QKGranularity:     Granularity(c.qk_granularity),
		SmoothQ:           Smooth(c.smooth_q),
		SmoothK:           Smooth(c.smooth_k),
		SmoothV:           SmoothV(c.smooth_v),
		VScale:            VScale(c.v_scale),
		Rotation:          Rotation(c.rotation),
		PVFormat:          PVFormat(c.pv_format),
		RowSum:            RowSum(c.row_sum),
		PVAccum:           PVAccum(c.pv_accum),
		PromotionInterval: int32(c.promotion_interval),
		Kernel:            Kernel(c.kernel),
		PVModel:           PVModel(c.pv_model),
	}
	if d.c() != c { // never lose what a newer header's preset sets
		return AttnDesc{}, newError(ErrInternal,
			"NewAttnDesc: preset %d sets a field that this package does not know", preset)
	}
	return d, nil
}

func (d *AttnDesc) c() C.sageattn_attn_desc {
	var c C.sageattn_attn_desc
	c.struct_size = C.uint32_t(unsafe.Sizeof(c))
	c.q_dtype = C.int32_t(d.QDType)
	c.kv_dtype = C.int32_t(d.KVDType)
	c.out_dtype = C.int32_t(d.OutDType)
	c.layout = C.int32_t(d.Layout)
	c.batch_mode = C.int32_t(d.BatchMode)
	c.mask = C.int32_t(d.Mask)
	c.window_left = C.int32_t(d.WindowLeft)
	c.window_right = C.int32_t(d.WindowRight)
	c.head_dim = C.int32_t(d.HeadDim)
	c.head_dim_v = C.int32_t(d.HeadDimV)
	c.num_qo_heads = C.int32_t(d.NumQoHeads)
	c.num_kv_heads = C.int32_t(d.NumKVHeads)
	c.sm_scale = C.float(d.SMScale)
	c.max_batch = C.int32_t(d.MaxBatch)
	c.max_qo_len = C.int32_t(d.MaxQoLen)
	c.max_kv_len = C.int32_t(d.MaxKVLen)
	c.max_total_qo = C.int64_t(d.MaxTotalQo)
	c.max_total_kv = C.int64_t(d.MaxTotalKV)
	c.qk_format = C.int32_t(d.QKFormat)
	c.qk_granularity = C.int32_t(d.QKGranularity)
	c.smooth_q = C.int32_t(d.SmoothQ)
	c.smooth_k = C.int32_t(d.SmoothK)
	c.smooth_v = C.int32_t(d.SmoothV)
	c.v_scale = C.int32_t(d.VScale)
	c.rotation = C.int32_t(d.Rotation)
	c.pv_format = C.int32_t(d.PVFormat)
	c.row_sum = C.int32_t(d.RowSum)
	c.pv_accum = C.int32_t(d.PVAccum)
	c.promotion_interval = C.int32_t(d.PromotionInterval)
	c.kernel = C.int32_t(d.Kernel)
	c.pv_model = C.int32_t(d.PVModel)
	if d.SMScaleSet {
		c.sm_scale_set = 1
	}
	return c
}
