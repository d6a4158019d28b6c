#pragma once

namespace sageattn {

// SHA-256, in hex, of the sources this binary was built from. The build generates its definition.
extern const char kSourceId[];

}  // namespace sageattn
