// How a command ends: its exit code, and the exception that carries one up to main.
#pragma once

#include <stdexcept>
#include <string>

namespace sageattn_cli {

enum ExitCode : int {
  kOk = 0,
  kFailed = 1,        // a comparison above its limit, a self-test that found an error
  kUsageError = 2,    // wrong flags
  kLibraryError = 3,  // libsageattn refused
  kFileError = 4,     // a file cannot be read or written, or its content does not fit
};

class Failure : public std::runtime_error {
 public:
  Failure(ExitCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ExitCode code() const { return code_; }

 private:
  ExitCode code_;
};

}  // namespace sageattn_cli
