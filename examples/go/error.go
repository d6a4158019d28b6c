// SPDX-License-Identifier: Apache-2.0

package sageattn

// #include <sageattn.h>
import "C"

import (
	"errors"
	"fmt"
	"unsafe"
)

// A Status is the status of a call. As an error it is a target for errors.Is:
//
//	if errors.Is(err, sageattn.ErrLimit) { ... }
type Status int32

const (
	OK Status = C.SAGEATTN_OK

	ErrInvalidArgument Status = C.SAGEATTN_E_INVALID_ARGUMENT
	ErrUnknownField    Status = C.SAGEATTN_E_UNKNOWN_FIELD
	ErrMisaligned      Status = C.SAGEATTN_E_MISALIGNED
	ErrAliased         Status = C.SAGEATTN_E_ALIASED
	ErrLimit           Status = C.SAGEATTN_E_LIMIT
	ErrWorkspace       Status = C.SAGEATTN_E_WORKSPACE
	ErrBufferTooSmall  Status = C.SAGEATTN_E_BUFFER_TOO_SMALL
	ErrUnsupported     Status = C.SAGEATTN_E_UNSUPPORTED
	ErrNoDevice        Status = C.SAGEATTN_E_NO_DEVICE
	ErrDriverTooOld    Status = C.SAGEATTN_E_DRIVER_TOO_OLD
	ErrNVRTCNotFound   Status = C.SAGEATTN_E_NVRTC_NOT_FOUND
	ErrNVRTCTooOld     Status = C.SAGEATTN_E_NVRTC_TOO_OLD
	ErrKernelMissing   Status = C.SAGEATTN_E_KERNEL_MISSING
	ErrBadBlob         Status = C.SAGEATTN_E_BAD_BLOB
	ErrOutOfMemory     Status = C.SAGEATTN_E_OUT_OF_MEMORY
	ErrCUDA            Status = C.SAGEATTN_E_CUDA
	ErrCompile         Status = C.SAGEATTN_E_COMPILE
	ErrSelfTest        Status = C.SAGEATTN_E_SELFTEST
	ErrInternal        Status = C.SAGEATTN_E_INTERNAL
)

// Error is the name of the constant in sageattn.h, for example "SAGEATTN_E_LIMIT".
func (s Status) Error() string { return C.GoString(C.sageattn_status_name(C.int32_t(s))) }

// An Error is a call that failed: in the library, or before it in this package, where the slices of
// the call are shorter than its lengths say. Every call owns its Error: nothing is kept in a thread.
type Error struct {
	Status  Status
	Name    string // of the status, for example "SAGEATTN_E_LIMIT"
	Message string // names the function, the field, its value and the limit
}

func (e *Error) Error() string { return e.Name + ": " + e.Message }

// Is makes errors.Is(err, sageattn.ErrLimit) true for an Error of that Status.
func (e *Error) Is(target error) bool {
	status, ok := target.(Status)
	return ok && status == e.Status
}

// ErrClosed is wrapped by the error of every call on a Context, Plan, Workspace or Buffer that was
// closed.
var ErrClosed = errors.New("it is closed")

func closed(function, what string) error {
	return fmt.Errorf("%s: the %s cannot be used: %w", function, what, ErrClosed)
}

func newError(status Status, format string, values ...any) *Error {
	return &Error{status, status.Error(), fmt.Sprintf(format, values...)}
}

// A result is the error struct of one call. It lives in Go memory, which a call may write because
// it holds no pointers.
type result struct{ c C.sageattn_error }

func newResult() *result {
	r := new(result)
	r.c.struct_size = C.uint32_t(unsafe.Sizeof(r.c))
	return r
}

// err turns the status of the call into an error. It returns the interface, lest a nil *Error
// become an error that is not nil.
func (r *result) err(status C.int32_t) error {
	if status == C.SAGEATTN_OK {
		return nil
	}
	return newError(Status(status), "%s", C.GoString(&r.c.message[0]))
}
