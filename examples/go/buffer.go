// SPDX-License-Identifier: Apache-2.0

package sageattn

// #include <stdlib.h>
// #include <string.h>
import "C"

import (
	"runtime"
	"sync/atomic"
	"unsafe"
)

// A Buffer is memory of C, zeroed. Execute takes plain slices; a Buffer is for data that outlives a
// call on C's side, that C itself fills, or that is so large that Go's collector should not count it.
// Its slices must not be used after Close, and nothing calls Close for you: while you hold a slice,
// the collector cannot know.
type Buffer struct {
	data unsafe.Pointer
	size int
}

// NewBuffer allocates size bytes, aligned to alignment, a power of two from 8.
func NewBuffer(size, alignment int) (*Buffer, error) {
	if size < 1 {
		return nil, newError(ErrInvalidArgument, "NewBuffer: size is %d, but must be 1 or more", size)
	}
	if alignment < 8 || alignment&(alignment-1) != 0 {
		return nil, newError(ErrInvalidArgument,
			"NewBuffer: alignment is %d, but must be a power of two from 8", alignment)
	}
	var data unsafe.Pointer
	if C.posix_memalign(&data, C.size_t(alignment), C.size_t(size)) != 0 {
		return nil, newError(ErrOutOfMemory, "NewBuffer: no %d bytes aligned to %d", size, alignment)
	}
	C.memset(data, 0, C.size_t(size))
	return &Buffer{data, size}, nil
}

// Float32s is the memory as float32. Empty after Close.
func (b *Buffer) Float32s() []float32 { return unsafe.Slice((*float32)(b.data), b.size/4) }

// Uint16s is the memory as the bits of F16 or BF16. Empty after Close.
func (b *Buffer) Uint16s() []uint16 { return unsafe.Slice((*uint16)(b.data), b.size/2) }

// Int32s is the memory as int32. Empty after Close.
func (b *Buffer) Int32s() []int32 { return unsafe.Slice((*int32)(b.data), b.size/4) }

// Close frees the memory. A second Close does nothing.
func (b *Buffer) Close() {
	C.free(b.data)
	b.data, b.size = nil, 0
}

// A Workspace is what one execute needs beside its inputs and outputs, on the CPU backend. Execute
// takes one from the plan's pool unless it is given one, which saves the pool's memory from the
// collector and makes its amount your choice.
type Workspace struct {
	buffer *Buffer
	busy   atomic.Bool // while an execute or Close uses it
}

// NewWorkspace allocates a workspace for executes of the plan, or of any other on the CPU backend that
// needs no more.
func (p *Plan) NewWorkspace() (*Workspace, error) {
	if p.info.Backend != BackendCPU {
		return nil, newError(ErrInvalidArgument, "Plan.NewWorkspace: the plan's backend is CUDA, whose "+
			"workspace is device memory that DeviceArgs names")
	}
	buffer, err := NewBuffer(int(p.info.MinWorkspace), int(p.info.WorkspaceAlignment))
	if err != nil {
		return nil, err
	}
	w := &Workspace{buffer: buffer}
	runtime.SetFinalizer(w, func(w *Workspace) { w.buffer.Close() }) // no slice of it can be held
	return w, nil
}

// acquire makes the caller the only user until release.
func (w *Workspace) acquire(function string) error {
	if !w.busy.CompareAndSwap(false, true) {
		return newError(ErrWorkspace,
			"%s: the workspace is in use; each execute in flight needs one of its own", function)
	}
	if w.buffer.data == nil {
		w.release()
		return closed(function, "workspace")
	}
	return nil
}

func (w *Workspace) release() { w.busy.Store(false) }

// Close frees the workspace. It fails while an execute uses it. A second Close does nothing.
func (w *Workspace) Close() error {
	if !w.busy.CompareAndSwap(false, true) {
		return newError(ErrWorkspace, "Workspace.Close: an execute uses the workspace")
	}
	defer w.release()
	w.buffer.Close()
	return nil
}
