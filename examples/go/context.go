// SPDX-License-Identifier: Apache-2.0

// Package sageattn computes attention with libsageattn: quantized, every query with every key that
// its mask admits. It is a thin layer over the C API; sageattn.h is the manual of every field.
//
//	context, err := sageattn.NewContext(sageattn.ContextDesc{Backend: sageattn.BackendCPU})
//	desc, err := sageattn.NewAttnDesc(sageattn.PresetSage2_8B) // then types, heads and limits
//	plan, err := context.NewPlan(desc)
//	err = plan.Execute(sageattn.Args{Batch: 1, QoLen: n, KVLen: n, Q: sageattn.Float32s(q), ...})
//
// Everything may be called from any goroutine at any time, Close included: it waits for the calls
// that are running on its handle, and later ones return an error that wraps ErrClosed. A handle
// that is never closed is freed when it is collected, at a time nobody knows: close it.
package sageattn

// #cgo LDFLAGS: -lsageattn
// #include <stdlib.h>
// #include "shim.h"
import "C"

import (
	"bytes"
	"runtime"
	"runtime/cgo"
	"sync"
	"unsafe"
)

// Version is the version of the library that is loaded, for example "0.1.0".
func Version() string { return C.GoString(C.sageattn_version_string()) }

// SourceID is the digest of the sources that the library was built from.
func SourceID() string { return C.GoString(C.sageattn_source_id()) }

// A ContextDesc says how a context is made. Its zero value is a good default, but that
// BackendAuto takes a GPU where there is one, so that data in slices wants BackendCPU. The hooks of
// a host allocator are not offered: Go's memory cannot serve them.
type ContextDesc struct {
	Flags      ContextFlags
	Backend    Backend
	Device     int32  // CUDA device ordinal
	TargetArch int32  // 0: the device's; 80, 86, 89, 90 or 120
	NumThreads int32  // of the CPU backend; 0: one for each processor
	CacheDir   string // kernel cache folder; "": see docs/cache.md
	NVRTCPath  string // NVRTC to load, file or folder; "": search

	// Log receives one line of text during a call on the context or on its plans, from any thread,
	// also from several at once. It must not call this package. nil: nothing is logged.
	Log func(level LogLevel, message string)
}

// A logger keeps the function alive that a context and its plans log to.
type logger struct{ handle cgo.Handle }

func newLogger(log func(LogLevel, string)) *logger {
	l := &logger{cgo.NewHandle(log)}
	runtime.SetFinalizer(l, func(l *logger) { l.handle.Delete() })
	return l
}

//export sageattnGoLog
func sageattnGoLog(handle C.uintptr_t, level C.int32_t, message *C.char) {
	cgo.Handle(handle).Value().(func(LogLevel, string))(LogLevel(level), C.GoString(message))
}

// A Context is one device, or the CPU's threads, with a cache of kernels.
type Context struct {
	mu     sync.RWMutex // held by readers while they use the handle
	handle *C.sageattn_context
	log    *logger
}

// NewContext makes a context.
func NewContext(desc ContextDesc) (*Context, error) {
	var c C.sageattn_context_desc
	c.struct_size = C.uint32_t(unsafe.Sizeof(c))
	c.flags = C.uint32_t(desc.Flags)
	c.backend = C.int32_t(desc.Backend)
	c.device = C.int32_t(desc.Device)
	c.target_arch = C.int32_t(desc.TargetArch)
	c.num_threads = C.int32_t(desc.NumThreads)
	for _, path := range []struct {
		name, value string
		to          **C.char
	}{{"cache_dir", desc.CacheDir, &c.cache_dir}, {"nvrtc_path", desc.NVRTCPath, &c.nvrtc_path}} {
		if bytes.IndexByte([]byte(path.value), 0) >= 0 { // where C would cut it
			return nil, newError(ErrInvalidArgument, "NewContext: %s is %q, but no path holds a NUL",
				path.name, path.value)
		}
		if path.value != "" {
			*path.to = C.CString(path.value)
			defer C.free(unsafe.Pointer(*path.to))
		}
	}
	context := new(Context)
	var log C.uintptr_t
	if desc.Log != nil {
		context.log = newLogger(desc.Log)
		log = C.uintptr_t(context.log.handle)
	}
	var handle *C.sageattn_context
	r := newResult()
	if err := r.err(C.sageattn_go_context_create(&c, log, &handle, &r.c)); err != nil {
		return nil, err
	}
	context.handle = handle
	runtime.SetFinalizer(context, (*Context).Close)
	return context, nil
}

// Close frees the context when no call uses it any more. Plans made from it stay usable. A second
// Close does nothing.
func (c *Context) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	C.sageattn_context_destroy(c.handle)
	c.handle = nil
	runtime.SetFinalizer(c, nil)
}

// use keeps the handle from being closed until release.
func (c *Context) use(function string) (release func(), err error) {
	c.mu.RLock()
	if c.handle == nil {
		c.mu.RUnlock()
		return nil, closed("Context."+function, "context")
	}
	return c.mu.RUnlock, nil
}

// Report says what was found and chosen, and why, as lines "key: value".
func (c *Context) Report() (string, error) {
	release, err := c.use("Report")
	if err != nil {
		return "", err
	}
	defer release()
	text, err := grow(func(data unsafe.Pointer, size C.size_t, needed *C.size_t, r *result) C.int32_t {
		return C.sageattn_context_report(c.handle, (*C.char)(data), size, needed, &r.c)
	})
	return string(bytes.TrimRight(text, "\x00")), err
}

// SelfTest runs small attentions of every preset and compares them with an exact computation.
func (c *Context) SelfTest() error {
	release, err := c.use("SelfTest")
	if err != nil {
		return err
	}
	defer release()
	r := newResult()
	return r.err(C.sageattn_selftest(c.handle, &r.c))
}

// ImportBlob adds the kernels of a blob. A blob is code: import only what you trust.
func (c *Context) ImportBlob(blob []byte) error {
	release, err := c.use("ImportBlob")
	if err != nil {
		return err
	}
	defer release()
	r := newResult()
	return r.err(C.sageattn_context_import_blob(c.handle, address(blob), C.size_t(len(blob)), &r.c))
}

// ExportBlob is every kernel that the context has compiled or loaded, for ImportBlob elsewhere.
func (c *Context) ExportBlob() ([]byte, error) {
	release, err := c.use("ExportBlob")
	if err != nil {
		return nil, err
	}
	defer release()
	return grow(func(data unsafe.Pointer, size C.size_t, needed *C.size_t, r *result) C.int32_t {
		return C.sageattn_context_export_blob(c.handle, data, size, needed, &r.c)
	})
}

// grow calls with larger buffers until the answer fits: it may grow between two calls.
func grow(call func(unsafe.Pointer, C.size_t, *C.size_t, *result) C.int32_t) ([]byte, error) {
	var data []byte
	for {
		var needed C.size_t
		r := newResult()
		status := call(address(data), C.size_t(len(data)), &needed, r)
		if status != C.SAGEATTN_E_BUFFER_TOO_SMALL {
			if err := r.err(status); err != nil {
				return nil, err
			}
			return data[:needed], nil
		}
		data = make([]byte, needed)
	}
}

// address is where the data of a slice is; nil if it has none.
func address[T any](s []T) unsafe.Pointer {
	if len(s) == 0 {
		return nil
	}
	return unsafe.Pointer(&s[0])
}
