#include "worker/server/listen_socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace palimpsest {
namespace {

constexpr int kBacklog = 128;
// After a connection could not be taken, such as for lack of descriptors.
constexpr int kPauseMs = 50;

absl::Status CannotListen(const std::string& address, absl::string_view why) {
  return absl::FailedPreconditionError(absl::StrCat(
      "cannot listen on ", address, ": ", why, "; expected HOST:PORT or unix:PATH that is free"));
}

absl::Status CannotListen(const std::string& address) {
  return CannotListen(address, std::strerror(errno));
}

// Whether it is a socket that refuses connections: its process is gone.
bool IsStale(const sockaddr_un& name) {
  struct stat status;
  if (::lstat(name.sun_path, &status) != 0 || !S_ISSOCK(status.st_mode)) return false;
  const UniqueFd probe(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  return probe.valid() &&
         ::connect(probe.get(), reinterpret_cast<const sockaddr*>(&name), sizeof(name)) != 0 &&
         errno == ECONNREFUSED;
}

absl::StatusOr<ListenSocket> ListenUnix(const std::string& address, absl::string_view path) {
  sockaddr_un name = {};
  name.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(name.sun_path)) {
    return CannotListen(address, "the path is empty or too long");
  }
  std::memcpy(name.sun_path, path.data(), path.size());
  if (IsStale(name)) ::unlink(name.sun_path);
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid() || ::bind(fd.get(), reinterpret_cast<sockaddr*>(&name), sizeof(name)) != 0 ||
      ::listen(fd.get(), kBacklog) != 0) {
    return CannotListen(address);
  }
  return ListenSocket{std::move(fd), address};
}

absl::StatusOr<int> PortOf(int fd) {
  sockaddr_storage name = {};
  socklen_t size = sizeof(name);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&name), &size) != 0) {
    return ErrnoStatus("getsockname");
  }
  return ntohs(name.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(name).sin6_port
                                          : reinterpret_cast<const sockaddr_in&>(name).sin_port);
}

absl::StatusOr<ListenSocket> ListenTcp(const std::string& address) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) return CannotListen(address, "it has no port");
  std::string host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(host.c_str(), address.c_str() + colon + 1, &hints, &found);
  if (error != 0) return CannotListen(address, ::gai_strerror(error));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owned(found, ::freeaddrinfo);
  UniqueFd fd(::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1;
  // Connections inherit that small messages are sent at once.
  if (!fd.valid() || ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0 ||
      ::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) != 0 ||
      ::bind(fd.get(), found->ai_addr, found->ai_addrlen) != 0 ||
      ::listen(fd.get(), kBacklog) != 0) {
    return CannotListen(address);
  }
  const absl::StatusOr<int> port = PortOf(fd.get());
  if (!port.ok()) return port.status();
  return ListenSocket{std::move(fd), absl::StrCat(address.substr(0, colon), ":", *port)};
}

}  // namespace

absl::StatusOr<ListenSocket> Listen(const std::string& address) {
  absl::string_view path = address;
  if (absl::ConsumePrefix(&path, "unix:")) return ListenUnix(address, path);
  return ListenTcp(address);
}

ConnectionTaker::ConnectionTaker(int socket, grpc::ServerBuilder& builder)
    : socket_(socket),
      acceptor_(builder.experimental().AddExternalConnectionAcceptor(
          grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
          grpc::InsecureServerCredentials())) {}

ConnectionTaker::~ConnectionTaker() { Stop(); }

absl::Status ConnectionTaker::Start() {
  stop_ = UniqueFd(::eventfd(0, EFD_CLOEXEC));
  if (!stop_.valid()) return ErrnoStatus("eventfd");
  thread_ = std::thread([this] { Run(); });
  return absl::OkStatus();
}

void ConnectionTaker::Stop() {
  if (!thread_.joinable()) return;
  const uint64_t one = 1;
  (void)!::write(stop_.get(), &one, sizeof(one));
  thread_.join();
}

void ConnectionTaker::Run() {
  pollfd wanted[2] = {{socket_, POLLIN, 0}, {stop_.get(), POLLIN, 0}};
  while (true) {
    if (::poll(wanted, 2, -1) < 0 && errno != EINTR) return;
    if (wanted[1].revents != 0) return;
    const int fd = ::accept4(socket_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) {
      // EAGAIN: another process took it.
      if (errno != EAGAIN && errno != EINTR) ::poll(&wanted[1], 1, kPauseMs);
      continue;
    }
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
    connection.listener_fd = socket_;
    connection.fd = fd;
    acceptor_->HandleNewConnection(&connection);
  }
}

}  // namespace palimpsest
