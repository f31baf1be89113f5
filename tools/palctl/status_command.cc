#include <grpcpp/client_context.h>
#include <poll.h>
#include <signal.h>
#include <termios.h>
#include <unistd.h>

#include <atomic>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/grpc_time.h"
#include "tools/palctl/commands.h"
#include "tools/palctl/status_view.h"

namespace palimpsest::palctl {
namespace {

// The router is asked once per tenant whose token is at hand.
void AskRouter(const Node& node, absl::Duration timeout, NodeStatus& status) {
  const absl::StatusOr<v1::Router::Stub*> router = node.router();
  if (!router.ok()) return;
  std::set<std::string> tenants;
  for (const auto& [tenant, file] : node.addresses().token_files) tenants.insert(tenant);
  if (!node.addresses().token.empty()) tenants = {""};
  for (const std::string& tenant : tenants) {
    grpc::ClientContext context;
    context.set_deadline(GrpcTimeout(timeout));
    absl::Status result = node.Authorize(tenant, context);
    v1::GetTenantStatusResponse response;
    if (result.ok()) {
      result = node.RouterError((*router)->GetTenantStatus(&context, {}, &response));
    }
    if (result.ok()) {
      status.router.push_back(std::move(response));
    } else {
      status.router_problems.push_back({tenant, std::string(result.message())});
    }
  }
}

absl::StatusOr<NodeStatus> AskNode(const Node& node, absl::Duration timeout) {
  const absl::StatusOr<v1::Broker::Stub*> broker = node.broker();
  if (!broker.ok()) return broker.status();
  NodeStatus status;
  grpc::ClientContext context;
  context.set_deadline(GrpcTimeout(timeout));
  const absl::Status result = node.BrokerError((*broker)->GetStatus(&context, {}, &status.broker));
  if (!result.ok()) return result;
  AskRouter(node, timeout, status);
  return status;
}

// Reads single keys without waiting for a line, and puts the terminal back at the end.
class RawKeys {
 public:
  explicit RawKeys(bool enabled) : enabled_(enabled && tcgetattr(STDIN_FILENO, &before_) == 0) {
    if (!enabled_) return;
    termios raw = before_;
    raw.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
    tcsetattr(STDIN_FILENO, TCSANOW, &raw);
  }
  ~RawKeys() {
    if (enabled_) tcsetattr(STDIN_FILENO, TCSANOW, &before_);
  }
  RawKeys(const RawKeys&) = delete;
  RawKeys& operator=(const RawKeys&) = delete;

  // Waits for at most `timeout`; true once q was pressed. A signal ends the wait.
  bool QuitPressed(absl::Duration timeout) const {
    pollfd input{enabled_ ? STDIN_FILENO : -1, POLLIN, 0};
    if (poll(&input, 1, static_cast<int>(absl::ToInt64Milliseconds(timeout))) <= 0) return false;
    char key = 0;
    return read(STDIN_FILENO, &key, 1) == 1 && (key == 'q' || key == 'Q');
  }

 private:
  const bool enabled_;
  termios before_{};
};

std::atomic<bool> interrupted{false};

// While it lives, Ctrl-C and SIGTERM only set `interrupted`.
class CatchInterrupt {
 public:
  CatchInterrupt() {
    struct sigaction action = {};
    action.sa_handler = [](int) { interrupted = true; };
    sigaction(SIGINT, &action, &before_int_);
    sigaction(SIGTERM, &action, &before_term_);
  }
  ~CatchInterrupt() {
    sigaction(SIGINT, &before_int_, nullptr);
    sigaction(SIGTERM, &before_term_, nullptr);
  }

 private:
  struct sigaction before_int_ = {};
  struct sigaction before_term_ = {};
};

std::string Snapshot(const NodeStatus& status, double since, absl::Duration interval) {
  std::string text = StatusTable(status);
  absl::StrAppend(&text, "\nmoved in the last ", absl::FormatDuration(interval), ":\n",
                  TransferTable(status.broker, since));
  return text;
}

}  // namespace

int RunStatus(const Node& node, const StatusOptions& options, const Terminal& terminal) {
  const absl::StatusOr<NodeStatus> status = AskNode(node, options.timeout);
  if (!status.ok()) return Fail(terminal, status.status());
  if (options.json) {
    terminal.out << StatusJson(*status).dump(1) << std::endl;
  } else {
    terminal.out << StatusTable(*status) << std::flush;
  }
  return kDone;
}

int RunTop(const Node& node, const TopOptions& options, const Terminal& terminal) {
  interrupted = false;
  const CatchInterrupt catch_interrupt;
  const RawKeys keys(terminal.interactive);
  for (int64_t shown = 0; options.count == 0 || shown < options.count; ++shown) {
    if (shown > 0 && keys.QuitPressed(options.interval)) break;
    if (interrupted) break;
    const double since = absl::ToDoubleSeconds(absl::Now() - options.interval - absl::UnixEpoch());
    const absl::StatusOr<NodeStatus> status = AskNode(node, absl::Seconds(3));
    if (!status.ok() && (shown == 0 || !terminal.interactive)) {
      return Fail(terminal, status.status());
    }
    const std::string text = status.ok() ? Snapshot(*status, since, options.interval)
                                         : absl::StrCat(status.status().message(), "\n");
    const std::string time = absl::FormatTime("%H:%M:%S", absl::Now(), absl::LocalTimeZone());
    if (terminal.interactive) {
      // Home, draw, then clear what is left below: no flicker.
      terminal.out << "\033[H" << time << "  q quits\033[K\n\n";
      for (const char c : text) terminal.out << (c == '\n' ? "\033[K\n" : std::string(1, c));
      terminal.out << "\033[J" << std::flush;
    } else {
      terminal.out << time << "\n" << text << "\n" << std::flush;
    }
  }
  return kDone;
}

}  // namespace palimpsest::palctl
