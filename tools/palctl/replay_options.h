// The command line of `palctl replay`.
#ifndef PALIMPSEST_TOOLS_PALCTL_REPLAY_OPTIONS_H_
#define PALIMPSEST_TOOLS_PALCTL_REPLAY_OPTIONS_H_

#include <CLI/App.hpp>

#include "tools/palctl/commands.h"

namespace palimpsest::palctl {

// Both outlive the parsing; `patience_seconds` is what ReplayOptions::patience is to be.
void AddReplay(CLI::App& app, ReplayOptions& options, double& patience_seconds);

}  // namespace palimpsest::palctl

#endif  // PALIMPSEST_TOOLS_PALCTL_REPLAY_OPTIONS_H_
