// Plots as SVG text, drawn without any other program. Pure and deterministic.
#ifndef PALIMPSEST_TOOLS_PALCTL_SVG_PLOT_H_
#define PALIMPSEST_TOOLS_PALCTL_SVG_PLOT_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"

namespace palimpsest::palctl {

struct PlotSeries {
  std::string label;
  std::vector<std::pair<double, double>> points;  // ascending in x
};

struct PlotPanel {
  std::string title, x_label, y_label;
  // Decades on the y axis; values below 1e-9 are left out.
  bool log_y = false;
  // Areas on top of one another, in the series' order; all have the same x values.
  bool stacked = false;
  // Series with the same label have the same colour in all panels.
  std::vector<PlotSeries> series;
};

// Panels in a grid, row by row, under a title. Values that are not finite, or not below
// 1e12, are left out.
std::string DrawSvg(absl::string_view title, const std::vector<PlotPanel>& panels, int columns);

// From a number at most `least` to one at least `most` in steps of 1, 2 or 5 times a power of ten,
// of which there are at most `count`.
std::vector<double> NiceTicks(double least, double most, int count);

}  // namespace palimpsest::palctl

#endif  // PALIMPSEST_TOOLS_PALCTL_SVG_PLOT_H_
