// The `sageattn` program: attention on tensor files, accuracy reports, and what the library says
// about the machine. It computes through the public header alone; `bench` looks behind it, to see each
// launch.
#include <cstdlib>
#include <exception>
#include <iostream>
#include <new>
#include <string>
#include <vector>

#include "commands.h"
#include "sageattn.h"

namespace sageattn_cli {

void add_footer(CLI::App& app, const std::string& text) {
  app.footer(text + "\n\n" + app.get_footer());
}

void add_json_flag(CLI::App& app, bool& json) {
  app.add_flag(
      "--json", json,
      "Write JSON to stdout, and nothing else there; numbers that are not finite are null");
}

void print_json(const Json& json) {
  std::cout << json.dump(2, ' ', false, Json::error_handler_t::replace) << '\n';
}

namespace {

constexpr const char* kFooter =
    "Exit codes:\n"
    "  0  success\n"
    "  1  a comparison above its limit, a self-test that failed, or memory that ran out\n"
    "  2  wrong usage\n"
    "  3  an error of the library; its message and status are on stderr\n"
    "  4  a file that cannot be read or written, or whose content does not fit";

int report(ExitCode code, const std::string& message) {
  std::cerr << "sageattn: error: " << message << '\n';
  return code;
}

int report_parse(const CLI::App& program, const CLI::ParseError& error) {
  if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::Success)) {
    return program.exit(error);  // --help or --version: prints it
  }
  return report(kUsageError, std::string(error.what()) + "\nRun with --help for more information.");
}

// CLI11 says of an unknown command no more than that one is required.
void check_command(int argc, char** argv, const std::vector<Command>& commands) {
  const std::string word = argc > 1 ? argv[1] : "";
  if (word.starts_with('-')) return;
  if (word == "help") throw CLI::CallForHelp();
  std::string known;
  for (const Command& command : commands) {
    if (command.app->get_name() == word) return;
    known += (known.empty() ? "" : ", ") + command.app->get_name();
  }
  throw CLI::ValidationError(
      (argc > 1 ? "unknown command '" + word + "'" : "a command is required") +
      "; the commands are " + known);
}

// To be pasted into a shell, under the program's own name.
std::string command_line(int argc, char** argv) {
  constexpr const char* kPlain =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-+=.,:/";
  std::string line = "sageattn";
  for (int i = 1; i < argc; ++i) {
    std::string word = argv[i];
    // What is recorded does not tell of a machine's folders.
    if (word[0] == '/') word = word.substr(word.rfind('/') + 1);
    const bool plain = !word.empty() && word.find_first_not_of(kPlain) == std::string::npos;
    line += plain ? " " + word : " '" + word + "'";
  }
  return line;
}

int run(const std::vector<Command>& commands) {
  for (const Command& command : commands) {
    if (!command.app->parsed()) continue;
    const ExitCode code = command.run();
    std::cout.flush();
    return std::cout ? code : report(kFileError, "stdout cannot be written");
  }
  return kUsageError;  // not reached: the parse requires a subcommand
}

int guarded_main(int argc, char** argv) {
  CLI::App program("SageAttention on the command line.", "sageattn");
  program.require_subcommand(1);
  program.set_version_flag("--version", sageattn_version_string());
  program.footer(kFooter);
  program.get_formatter()->column_width(34);
  const std::vector<Command> commands = {add_run(program),
                                         add_compare(program),
                                         add_demo(program),
                                         add_compile(program),
                                         add_bench(program, command_line(argc, argv)),
                                         add_assess(program),
                                         add_estimate(program),
                                         add_info(program),
                                         add_selftest(program)};
  try {
    check_command(argc, argv, commands);
    program.parse(argc, argv);
    return run(commands);
  } catch (const CLI::ParseError& error) {
    return report_parse(program, error);
  }
}

}  // namespace
}  // namespace sageattn_cli

int main(int argc, char** argv) {
  using namespace sageattn_cli;
  try {
    return guarded_main(argc, argv);
  } catch (const Failure& failure) {
    return report(failure.code(), failure.what());
  } catch (const std::bad_alloc&) {
    return report(kFailed, "out of memory");
  } catch (const std::exception& error) {
    return report(kFailed, error.what());
  }
}
