// The commands. Each function adds a subcommand with its flags to the program.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>

#include "failure.h"
#include "options.h"

namespace sageattn_cli {

struct Command {
  CLI::App* app;
  std::function<ExitCode()> run;  // after the parse, if app was chosen
};

Command add_run(CLI::App& program);
Command add_compare(CLI::App& program);
Command add_demo(CLI::App& program);
Command add_compile(CLI::App& program);
Command add_bench(CLI::App& program, const std::string& command);  // as it was typed
Command add_assess(CLI::App& program);
Command add_estimate(CLI::App& program);
Command add_info(CLI::App& program);
Command add_selftest(CLI::App& program);

// Puts text between a command's flags and the exit codes that every command shows.
void add_footer(CLI::App& app, const std::string& text);

void add_json_flag(CLI::App& app, bool& json);

// To stdout. Numbers that are not finite become null.
void print_json(const Json& json);

}  // namespace sageattn_cli
