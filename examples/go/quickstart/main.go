// Causal attention of 4 heads over 256 tokens. Needs no GPU.
package main

import (
	"fmt"
	"log"

	"sageattn"
)

const tokens, heads, dim = 256, 4, 64

func main() {
	log.SetFlags(0)
	q := make([]float32, tokens*heads*dim) // all [token][head][channel]
	for i := range q {
		q[i] = float32(i*37%101)/50 - 1
	}
	k, v, out := q, q, make([]float32, len(q))

	context, err := sageattn.NewContext(sageattn.ContextDesc{Backend: sageattn.BackendCPU})
	check(err) // BackendCPU, as the data is in slices
	defer context.Close()

	desc, err := sageattn.NewAttnDesc(sageattn.PresetSage2_8B)
	check(err)
	desc.QDType = sageattn.F32
	desc.Mask = sageattn.MaskCausalBottomRight
	desc.HeadDim, desc.NumQoHeads = dim, heads
	desc.MaxQoLen, desc.MaxKVLen = tokens, tokens // the limits of every execute
	plan, err := context.NewPlan(desc)
	check(err)
	defer plan.Close()

	check(plan.Execute(sageattn.Args{
		Batch: 1, QoLen: tokens, KVLen: tokens,
		Q: sageattn.Float32s(q), K: sageattn.Float32s(k), V: sageattn.Float32s(v),
		Out: sageattn.Float32s(out),
	}))
	last := out[(tokens-1)*heads*dim:]
	fmt.Printf("token 0: %.3f %.3f (its own v: %.3f %.3f), last token: %.3f %.3f\n",
		out[0], out[1], v[0], v[1], last[0], last[1])
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
