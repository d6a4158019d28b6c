package main

// #cgo LDFLAGS: -ldl
// #include "driver.h"
import "C"

import (
	"fmt"
	"unsafe"
)

// The little of the CUDA driver that main needs. It is found at run time, so that the program also
// starts where there is none. The driver keeps a current context per thread: call from one that
// runtime.LockOSThread holds.

func openDriver() error { return driverError(C.driver_open()) }

func driverError(message *C.char) error {
	if message == nil {
		return nil
	}
	return fmt.Errorf("%s", C.GoString(message))
}

func must(message *C.char) {
	check(driverError(message))
}

func allocate(size int) uintptr {
	var address C.uint64_t
	must(C.driver_allocate(&address, C.size_t(size)))
	return uintptr(address)
}

func upload(x []uint16) uintptr {
	address := allocate(2 * len(x))
	copyTo(address, x)
	return address
}

func copyTo(address uintptr, x []uint16) {
	must(C.driver_upload(C.uint64_t(address), unsafe.Pointer(&x[0]), C.size_t(2*len(x))))
}

func download[T uint16 | float32](x []T, address uintptr) {
	size := C.size_t(len(x)) * C.size_t(unsafe.Sizeof(x[0]))
	must(C.driver_download(unsafe.Pointer(&x[0]), C.uint64_t(address), size))
}

func free(address uintptr) { must(C.driver_free(C.uint64_t(address))) }

func newStream() uintptr {
	var stream C.uintptr_t
	must(C.driver_stream(&stream))
	return uintptr(stream)
}

func synchronize(stream uintptr) { must(C.driver_synchronize(C.uintptr_t(stream))) }

// capture is the graph of what work enqueues on the stream, ready to launch.
func capture(stream uintptr, work func()) (graph uintptr) {
	must(C.driver_begin_capture(C.uintptr_t(stream)))
	work()
	var exec C.uintptr_t
	must(C.driver_end_capture(C.uintptr_t(stream), &exec))
	return uintptr(exec)
}

func launch(graph, stream uintptr) {
	must(C.driver_launch(C.uintptr_t(graph), C.uintptr_t(stream)))
}
