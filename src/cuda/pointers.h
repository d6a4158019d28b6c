// Whether an execute can reach the memory it is given, as far as the driver can tell: what it cannot
// would be a fault of the whole process, or of every later call on the device.
#pragma once

#include <span>

#include "src/core/config.h"
#include "src/cuda/device.h"
#include "src/cuda/driver.h"

namespace sageattn::cuda {

// Kernels on the device, whose context is current. Queries only: legal during stream capture. Fails with
// INVALID_ARGUMENT, naming the field.
void check_on_device(const Driver& driver, const DeviceInfo& device,
                     std::span<const Operand> operands);

// This process. Asks a driver that is in it already; loads and initialises none. Fails likewise.
void check_on_host(std::span<const Operand> operands);

}  // namespace sageattn::cuda
