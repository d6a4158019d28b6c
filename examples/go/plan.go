// SPDX-License-Identifier: Apache-2.0

package sageattn

// #include <sageattn.h>
import "C"

import (
	"runtime"
	"sync"
	"unsafe"
)

// A Plan is a decision, immutable: kernel, tiles and the limits of every execute.
type Plan struct {
	mu         sync.RWMutex // held by readers while they use the handle
	handle     *C.sageattn_plan
	log        *logger // the context's: the plan logs there too
	desc       AttnDesc
	info       PlanInfo
	workspaces sync.Pool // of *Workspace, for the CPU backend
}

// NewPlan makes a plan: checks the desc, chooses the kernel, and compiles or loads it.
func (c *Context) NewPlan(desc AttnDesc) (*Plan, error) {
	release, err := c.use("NewPlan")
	if err != nil {
		return nil, err
	}
	defer release()
	cDesc := desc.c()
	var handle *C.sageattn_plan
	r := newResult()
	if err := r.err(C.sageattn_plan_create(c.handle, &cDesc, &handle, &r.c)); err != nil {
		return nil, err
	}
	p := &Plan{handle: handle, log: c.log, desc: desc}
	runtime.SetFinalizer(p, (*Plan).Close)
	var info C.sageattn_plan_info
	info.struct_size = C.uint32_t(unsafe.Sizeof(info))
	if err := r.err(C.sageattn_plan_get_info(handle, &info, &r.c)); err != nil {
		p.Close()
		return nil, err
	}
	p.info = planInfo(&info)
	return p, nil
}

// Query says whether NewPlan would accept the desc, and what the plan would be, and makes nothing.
func (c *Context) Query(desc AttnDesc) (PlanInfo, error) {
	release, err := c.use("Query")
	if err != nil {
		return PlanInfo{}, err
	}
	defer release()
	cDesc := desc.c()
	var info C.sageattn_plan_info
	info.struct_size = C.uint32_t(unsafe.Sizeof(info))
	r := newResult()
	if err := r.err(C.sageattn_plan_query(c.handle, &cDesc, &info, &r.c)); err != nil {
		return PlanInfo{}, err
	}
	return planInfo(&info), nil
}

// Info says what the plan is. It stays known after Close.
func (p *Plan) Info() PlanInfo { return p.info }

// Close frees the plan when no call uses it any more; work already enqueued on a GPU runs on. A
// second Close does nothing.
func (p *Plan) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	C.sageattn_plan_destroy(p.handle)
	p.handle = nil
	runtime.SetFinalizer(p, nil)
}

// use keeps the handle from being closed until release.
func (p *Plan) use(function string) (release func(), err error) {
	p.mu.RLock()
	if p.handle == nil {
		p.mu.RUnlock()
		return nil, closed("Plan."+function, "plan")
	}
	return p.mu.RUnlock, nil
}

// Kernel says what a kernel of the plan is, 0..Info().NumKernels - 1.
func (p *Plan) Kernel(index int32) (KernelInfo, error) {
	release, err := p.use("Kernel")
	if err != nil {
		return KernelInfo{}, err
	}
	defer release()
	var info C.sageattn_kernel_info
	info.struct_size = C.uint32_t(unsafe.Sizeof(info))
	r := newResult()
	if err := r.err(C.sageattn_plan_get_kernel(p.handle, C.int32_t(index), &info, &r.c)); err != nil {
		return KernelInfo{}, err
	}
	return kernelInfo(&info), nil
}

// ExportBlob is the plan's kernels, for Context.ImportBlob elsewhere.
func (p *Plan) ExportBlob() ([]byte, error) {
	release, err := p.use("ExportBlob")
	if err != nil {
		return nil, err
	}
	defer release()
	return grow(func(data unsafe.Pointer, size C.size_t, needed *C.size_t, r *result) C.int32_t {
		return C.sageattn_plan_export_blob(p.handle, data, size, needed, &r.c)
	})
}
