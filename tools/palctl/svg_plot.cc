#include "tools/palctl/svg_plot.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"

namespace palimpsest::palctl {
namespace {

constexpr int kWidth = 430, kHeight = 300;  // of a panel without its legend
constexpr int kLeft = 62, kRight = 14, kTop = 30, kBottom = 42;
constexpr int kTitleHeight = 40, kLegendRow = 16;
constexpr double kCharacter = 6.4;  // mean width of a letter in the legend
constexpr int kTicks = 6;
constexpr double kLargest = 1e12, kLeastOfDecades = 1e-9;  // that are drawn

// Told apart by most kinds of colour blindness too (Okabe and Ito 2008, and two more).
constexpr const char* kColours[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00",
                                    "#56b4e9", "#444444", "#8c6d31", "#7570b3", "#b0b000"};
constexpr const char* kDashes[] = {"", "6 3", "2 3"};

std::string Escaped(absl::string_view text) {
  return absl::StrReplaceAll(text,
                             {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}});
}

std::string Number(double value) { return absl::StrFormat("%.6g", value); }

std::string Text(double x, double y, absl::string_view anchor, absl::string_view text,
                 absl::string_view more = "") {
  return absl::StrFormat("<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\"%s>%s</text>\n", x, y,
                         anchor, more, Escaped(text));
}

std::string Line(double x1, double y1, double x2, double y2, absl::string_view colour) {
  return absl::StrFormat("<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"%s\"/>\n",
                         x1, y1, x2, y2, colour);
}

struct Style {
  const char* colour;
  const char* dash;
};

// In the order in which labels first appear.
class Styles {
 public:
  explicit Styles(const std::vector<PlotPanel>& panels) {
    for (const PlotPanel& panel : panels) {
      for (const PlotSeries& series : panel.series) {
        if (std::find(labels_.begin(), labels_.end(), series.label) == labels_.end()) {
          labels_.push_back(series.label);
        }
      }
    }
  }

  Style Of(const std::string& label) const {
    const auto i =
        static_cast<size_t>(std::find(labels_.begin(), labels_.end(), label) - labels_.begin());
    return {kColours[i % std::size(kColours)],
            kDashes[i / std::size(kColours) % std::size(kDashes)]};
  }

 private:
  std::vector<std::string> labels_;
};

struct Axis {
  double from = 0, to = 1;
  bool log = false;
  std::vector<double> ticks;

  // 0 to 1.
  double Place(double value) const {
    if (log) return std::log10(value / from) / std::log10(to / from);
    return (value - from) / (to - from);
  }
};

Axis LinearAxis(double least, double most, int count) {
  Axis axis;
  axis.ticks = NiceTicks(least, most, count);
  axis.from = axis.ticks.front();
  axis.to = axis.ticks.back();
  return axis;
}

Axis LogAxis(double least, double most) {
  Axis axis;
  axis.log = true;
  axis.from = std::pow(10, std::floor(std::log10(least)));
  axis.to = std::max(std::pow(10, std::ceil(std::log10(most))), 10 * axis.from);
  const auto decades = static_cast<int>(std::lround(std::log10(axis.to / axis.from)));
  const int step = decades / kTicks + 1;
  for (int i = 0; i <= decades; i += step) axis.ticks.push_back(axis.from * std::pow(10, i));
  return axis;
}

// What can be drawn of a panel; stacked series are sums already.
std::vector<PlotSeries> Drawable(const PlotPanel& panel) {
  std::vector<PlotSeries> drawable = panel.series;
  if (panel.stacked) {
    for (size_t i = 1; i < drawable.size(); ++i) {
      const size_t count = std::min(drawable[i].points.size(), drawable[i - 1].points.size());
      drawable[i].points.resize(count);
      for (size_t k = 0; k < count; ++k) {
        drawable[i].points[k].second += drawable[i - 1].points[k].second;
      }
    }
  }
  for (PlotSeries& series : drawable) {
    std::erase_if(series.points, [&](const auto& point) {
      return !(std::abs(point.first) < kLargest && std::abs(point.second) < kLargest) ||
             (panel.log_y && point.second < kLeastOfDecades);
    });
  }
  return drawable;
}

class PanelDrawing {
 public:
  PanelDrawing(const PlotPanel& panel, const Styles& styles)
      : panel_(panel), styles_(styles), series_(Drawable(panel)) {
    double x_least = std::numeric_limits<double>::infinity(), x_most = -x_least;
    double y_least = x_least, y_most = x_most;
    for (const PlotSeries& series : series_) {
      for (const auto& [x, y] : series.points) {
        x_least = std::min(x_least, x);
        x_most = std::max(x_most, x);
        y_least = std::min(y_least, y);
        y_most = std::max(y_most, y);
      }
    }
    empty_ = x_least > x_most;
    if (empty_) return;
    x_ = LinearAxis(std::min(x_least, 0.0), x_most, kTicks);
    y_ =
        panel.log_y ? LogAxis(y_least, y_most) : LinearAxis(std::min(y_least, 0.0), y_most, kTicks);
  }

  int LegendRows() const {
    int rows = 0;
    double x = kWidth;
    for (const PlotSeries& series : panel_.series) {
      x += LegendWidth(series);
      if (x <= kWidth - kRight) continue;
      ++rows;
      x = kLeft + LegendWidth(series);
    }
    return rows;
  }

  std::string Draw() const {
    std::string svg = Text(kLeft, 18, "start", panel_.title, " font-weight=\"bold\"");
    if (empty_) {
      svg += Text(kWidth / 2.0, kHeight / 2.0, "middle", "nothing was measured");
      return svg;
    }
    svg += DrawAxes();
    // What is in front is drawn last.
    if (panel_.stacked) {
      for (size_t i = series_.size(); i-- > 0;) svg += DrawArea(series_[i]);
    } else {
      for (const PlotSeries& series : series_) svg += DrawLine(series);
    }
    return svg + DrawLegend();
  }

 private:
  static double LegendWidth(const PlotSeries& series) {
    return 30 + kCharacter * static_cast<double>(series.label.size());
  }

  double X(double x) const { return kLeft + x_.Place(x) * (kWidth - kLeft - kRight); }
  double Y(double y) const { return kHeight - kBottom - y_.Place(y) * (kHeight - kTop - kBottom); }

  std::string DrawAxes() const {
    std::string svg;
    for (const double tick : y_.ticks) {
      svg += Line(kLeft, Y(tick), kWidth - kRight, Y(tick), "#dddddd");
      svg += Text(kLeft - 6, Y(tick) + 4, "end", Number(tick));
    }
    for (const double tick : x_.ticks) {
      svg += Line(X(tick), kHeight - kBottom, X(tick), kHeight - kBottom + 4, "#444444");
      svg += Text(X(tick), kHeight - kBottom + 16, "middle", Number(tick));
    }
    svg += Line(kLeft, kHeight - kBottom, kWidth - kRight, kHeight - kBottom, "#444444");
    svg += Text((kLeft + kWidth - kRight) / 2.0, kHeight - 8, "middle", panel_.x_label);
    const double middle = (kTop + kHeight - kBottom) / 2.0;
    svg += Text(14, middle, "middle", panel_.y_label,
                absl::StrFormat(" transform=\"rotate(-90 14 %.1f)\"", middle));
    return svg;
  }

  std::string DrawLine(const PlotSeries& series) const {
    const Style style = styles_.Of(series.label);
    std::vector<std::string> places;
    std::string marks;
    for (const auto& [x, y] : series.points) {
      places.push_back(absl::StrFormat("%.1f,%.1f", X(x), Y(y)));
      absl::StrAppendFormat(&marks, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"%s\"/>\n", X(x),
                            Y(y), style.colour);
    }
    return absl::StrCat("<polyline fill=\"none\" stroke-width=\"2\" stroke=\"", style.colour,
                        "\" stroke-dasharray=\"", style.dash, "\" points=\"",
                        absl::StrJoin(places, " "), "\"/>\n", marks);
  }

  std::string DrawArea(const PlotSeries& series) const {
    if (series.points.empty()) return "";
    std::vector<std::string> places = {
        absl::StrFormat("%.1f,%.1f", X(series.points.front().first), Y(0))};
    for (const auto& [x, y] : series.points) {
      places.push_back(absl::StrFormat("%.1f,%.1f", X(x), Y(y)));
    }
    places.push_back(absl::StrFormat("%.1f,%.1f", X(series.points.back().first), Y(0)));
    return absl::StrCat("<polygon fill=\"", styles_.Of(series.label).colour, "\" points=\"",
                        absl::StrJoin(places, " "), "\"/>\n");
  }

  std::string DrawLegend() const {
    std::string svg;
    double x = kWidth, y = kHeight - kLegendRow + 12;
    for (const PlotSeries& series : panel_.series) {
      if (x + LegendWidth(series) > kWidth - kRight) {
        x = kLeft;
        y += kLegendRow;
      }
      const Style style = styles_.Of(series.label);
      absl::StrAppendFormat(&svg,
                            "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"%s\" "
                            "stroke-width=\"%d\" stroke-dasharray=\"%s\"/>\n",
                            x, y - 4, x + 16, y - 4, style.colour, panel_.stacked ? 9 : 3,
                            style.dash);
      svg += Text(x + 21, y, "start", series.label);
      x += LegendWidth(series);
    }
    return svg;
  }

  const PlotPanel& panel_;
  const Styles& styles_;
  const std::vector<PlotSeries> series_;
  bool empty_ = false;
  Axis x_, y_;
};

}  // namespace

std::vector<double> NiceTicks(double least, double most, int count) {
  if (!(most > least)) most = least + std::max(1.0, std::abs(least));
  const double rough = (most - least) / std::max(count - 1, 1);
  double step = std::pow(10, std::floor(std::log10(rough)));
  const auto ticks = [&](double width) {
    std::vector<double> list;
    const double first = std::floor(least / width + 1e-9), last = std::ceil(most / width - 1e-9);
    for (double i = first; i <= last; ++i) list.push_back(i * width);
    return list;
  };
  for (const double factor : {1.0, 2.0, 5.0, 10.0, 20.0}) {
    std::vector<double> list = ticks(step * factor);
    if (static_cast<int>(list.size()) <= std::max(count, 2)) return list;
  }
  return {least, most};
}

std::string DrawSvg(absl::string_view title, const std::vector<PlotPanel>& panels, int columns) {
  const Styles styles(panels);
  std::string body;
  int y = kTitleHeight;
  for (size_t first = 0; first < panels.size(); first += static_cast<size_t>(columns)) {
    int legend = 0;
    for (size_t i = first; i < std::min(panels.size(), first + static_cast<size_t>(columns)); ++i) {
      const PanelDrawing drawing(panels[i], styles);
      legend = std::max(legend, drawing.LegendRows() * kLegendRow);
      absl::StrAppendFormat(&body, "<g transform=\"translate(%d %d)\">\n%s</g>\n",
                            static_cast<int>(i - first) * kWidth, y, drawing.Draw());
    }
    y += kHeight + legend + 12;
  }
  return absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" "
      "font-family=\"Helvetica, "
      "Arial, sans-serif\" font-size=\"11\">\n<rect width=\"100%%\" height=\"100%%\" "
      "fill=\"#ffffff\"/>\n%s%s</svg>\n",
      columns * kWidth, y, Text(kLeft, 26, "start", title, " font-size=\"16\""), body);
}

}  // namespace palimpsest::palctl
