#include "broker/server/descriptor_server.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace palimpsest {
namespace {

// How long an accept or a receive waits before it looks around again.
constexpr absl::Duration kLookAround = absl::Seconds(30);
constexpr absl::Duration kAcceptPause = absl::Milliseconds(50);

}  // namespace

absl::StatusOr<std::unique_ptr<DescriptorServer>> DescriptorServer::Start(
    Options options, const Clock& clock, HandOverTable& hand_overs, DescriptorDelegate& delegate) {
  for (const TenantCredentials& tenant : options.tenants) {
    if (!tenant.uid.has_value() && tenant.secret.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tenant ", tenant.name, " has neither a uid nor a secret: anybody could be it"));
    }
  }
  std::unique_ptr<DescriptorServer> server(
      new DescriptorServer(std::move(options), clock, hand_overs, delegate));
  for (const Socket& socket : server->options_.sockets) {
    absl::StatusOr<DescriptorListener> listener =
        DescriptorListener::Listen(socket.path, socket.mode);
    if (!listener.ok()) return listener.status();
    server->listeners_.push_back(std::move(*listener));
  }
  for (size_t i = 0; i < server->listeners_.size(); ++i) {
    server->acceptors_.emplace_back([raw = server.get(), i] {
      raw->AcceptLoop(raw->listeners_[i], raw->options_.sockets[i].only);
    });
  }
  return server;
}

DescriptorServer::DescriptorServer(Options options, const Clock& clock, HandOverTable& hand_overs,
                                   DescriptorDelegate& delegate)
    : options_(std::move(options)), clock_(clock), hand_overs_(hand_overs), delegate_(delegate) {}

DescriptorServer::~DescriptorServer() { Stop(); }

void DescriptorServer::Stop() {
  if (stopping_.exchange(true)) return;
  for (DescriptorListener& listener : listeners_) listener.Shutdown();
  for (std::thread& acceptor : acceptors_) acceptor.join();
  std::vector<Connection*> open;
  {
    MutexLock lock(&mu_);
    for (const auto& [id, connection] : connections_) open.push_back(connection.get());
  }
  // Only acceptors remove connections, and they are gone.
  for (Connection* connection : open) connection->channel.Shutdown();
  for (Connection* connection : open) connection->thread.join();
  MutexLock lock(&mu_);
  connections_.clear();
}

void DescriptorServer::AcceptLoop(DescriptorListener& listener, std::optional<TenantId> only) {
  while (!stopping_.load()) {
    absl::StatusOr<DescriptorChannel> channel = listener.Accept(kLookAround);
    ReapFinished();
    if (channel.ok()) {
      Admit(std::move(*channel), only);
    } else if (absl::IsCancelled(channel.status())) {
      return;
    } else if (!absl::IsDeadlineExceeded(channel.status())) {
      // Out of descriptors or memory: the connection waits in the backlog.
      absl::SleepFor(kAcceptPause);
    }
  }
}

void DescriptorServer::Admit(DescriptorChannel channel, std::optional<TenantId> only) {
  stats_.accepted.fetch_add(1);
  auto connection = std::make_unique<Connection>(std::move(channel));
  connection->only = only;
  Connection* raw = connection.get();
  {
    MutexLock lock(&mu_);
    if (connections_.size() < options_.max_connections) {
      const ConnectionId id(next_connection_++);
      connections_[id] = std::move(connection);
      // The thread's first look at the server takes the lock, so that it finds itself registered.
      raw->thread = std::thread([this, id, raw] { Serve(id, *raw); });
      return;
    }
  }
  stats_.protocol_refusals.fetch_add(1);
  // A refusal that cannot be sent at once is not worth a wait.
  (void)connection->channel.Send(
      Refused{absl::StrCat("the broker serves ", options_.max_connections,
                           " descriptor connections already; try again later")},
      {}, absl::ZeroDuration());
}

void DescriptorServer::ReapFinished() {
  std::vector<std::unique_ptr<Connection>> finished;
  {
    MutexLock lock(&mu_);
    for (auto it = connections_.begin(); it != connections_.end();) {
      auto here = it++;
      if (!here->second->finished) continue;
      finished.push_back(std::move(here->second));
      connections_.erase(here);
    }
  }
  for (const std::unique_ptr<Connection>& connection : finished) connection->thread.join();
}

void DescriptorServer::Serve(ConnectionId id, Connection& connection) {
  stats_.open_connections.fetch_add(1);
  const absl::StatusOr<DescriptorPeer> peer = Greet(id, connection);
  if (peer.ok()) {
    int failures = 0;
    while (!stopping_.load() && ServeRequest(*peer, connection, failures).ok()) {
    }
    Unregister(id, connection);
    delegate_.ConnectionClosed(*peer);
  } else if (!absl::IsUnavailable(peer.status())) {
    CountRefusal(peer.status());
    (void)connection.channel.Send(Refused{std::string(peer.status().message())}, {},
                                  options_.send_timeout);
  }
  connection.channel.Shutdown();
  stats_.open_connections.fetch_sub(1);
  MutexLock lock(&mu_);
  connection.finished = true;
}

absl::StatusOr<DescriptorPeer> DescriptorServer::Greet(ConnectionId id, Connection& connection) {
  absl::StatusOr<PeerIdentity> identity = connection.channel.IdentifyPeer();
  if (!identity.ok()) return identity.status();
  if (absl::Status status = AdmitStranger(identity->uid, connection); !status.ok()) return status;
  const absl::StatusOr<Hello> hello = connection.channel.ReceiveA<Hello>(options_.hello_timeout);
  if (absl::IsDeadlineExceeded(hello.status())) {
    return absl::InvalidArgumentError("no Hello came in time");
  }
  if (!hello.ok()) return hello.status();
  const absl::StatusOr<TenantId> tenant = Recognise(*hello, identity->uid, connection.only);
  if (!tenant.ok()) return tenant.status();
  DescriptorPeer peer{id, *tenant, identity->uid,
                      std::make_shared<const ProcessHandle>(std::move(identity->process))};
  if (absl::Status status = Register(peer, connection); !status.ok()) return status;
  stats_.welcomed.fetch_add(1);
  const absl::Status sent =
      connection.channel.Send(Welcome{connection.nonce}, {}, options_.send_timeout);
  if (!sent.ok()) {
    Unregister(id, connection);
    return absl::UnavailableError(sent.message());
  }
  return peer;
}

void DescriptorServer::CountRefusal(const absl::Status& refusal) {
  switch (refusal.code()) {
    case absl::StatusCode::kUnauthenticated:
      stats_.identity_refusals.fetch_add(1);
      break;
    case absl::StatusCode::kPermissionDenied:
      stats_.secret_refusals.fetch_add(1);
      break;
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kDeadlineExceeded:
      stats_.token_refusals.fetch_add(1);
      break;
    default:
      stats_.protocol_refusals.fetch_add(1);
      break;
  }
}

absl::StatusOr<TenantId> DescriptorServer::Recognise(const Hello& hello, uid_t uid,
                                                     std::optional<TenantId> only) const {
  if (hello.version != kDescriptorProtocolVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("the broker speaks version ", kDescriptorProtocolVersion,
                     " of the descriptor protocol, the worker ", hello.version,
                     ": run worker and broker of the same release"));
  }
  for (const TenantCredentials& tenant : options_.tenants) {
    if (tenant.name != hello.tenant) continue;
    if (only.has_value() && *only != tenant.tenant) {
      return absl::PermissionDeniedError(
          absl::StrCat("this socket is not the one of tenant ", hello.tenant));
    }
    if (tenant.uid.has_value() && *tenant.uid != uid) {
      return absl::UnauthenticatedError(absl::StrCat("tenant ", hello.tenant,
                                                     " runs as another uid than ", uid,
                                                     ": see tenants[].uid of the broker"));
    }
    if (!tenant.secret.empty() && !ConstantTimeEqual(tenant.secret, hello.secret)) {
      return absl::PermissionDeniedError(
          absl::StrCat("wrong secret for tenant ", hello.tenant,
                       ": the worker's secret_file must hold what the broker's holds"));
    }
    return tenant.tenant;
  }
  return absl::PermissionDeniedError(
      absl::StrCat("no tenant \"", hello.tenant, "\" is configured"));
}

absl::Status DescriptorServer::AdmitStranger(uid_t uid, Connection& connection) {
  MutexLock lock(&mu_);
  const auto strangers =
      std::count_if(connections_.begin(), connections_.end(), [uid](const auto& entry) {
        return entry.second->stranger == uid && !entry.second->finished;
      });
  if (static_cast<size_t>(strangers) >= options_.max_strangers_per_uid) {
    return absl::ResourceExhaustedError(
        absl::StrCat("uid ", uid, " has ", strangers, " connections open that said no Hello yet"));
  }
  connection.stranger = uid;
  return absl::OkStatus();
}

absl::Status DescriptorServer::Register(const DescriptorPeer& peer, Connection& connection) {
  const Token nonce = Token::Random();
  MutexLock lock(&mu_);
  const auto of_tenant =
      std::count_if(connections_.begin(), connections_.end(), [&peer](const auto& entry) {
        return entry.second->peer.has_value() && entry.second->peer->tenant == peer.tenant;
      });
  if (static_cast<size_t>(of_tenant) >= options_.max_connections_per_tenant) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the tenant has ", of_tenant, " descriptor connections open already"));
  }
  connection.nonce = nonce;
  connection.nonce_expiry = clock_.Now() + options_.nonce_lifetime;
  connection.stranger.reset();
  connection.peer = peer;
  nonces_[nonce] = peer.connection;
  hand_overs_.Open(peer.connection);
  return absl::OkStatus();
}

void DescriptorServer::Unregister(ConnectionId id, Connection& connection) {
  {
    MutexLock lock(&mu_);
    nonces_.erase(connection.nonce);
    connection.peer.reset();
  }
  hand_overs_.Drop(id);
}

absl::Status DescriptorServer::ServeRequest(const DescriptorPeer& peer, Connection& connection,
                                            int& failures) {
  absl::StatusOr<ReceivedPacket> request =
      connection.channel.Receive(std::min(kLookAround, options_.nonce_lifetime));
  absl::Status result = request.status();
  if (absl::IsDeadlineExceeded(result)) {
    MutexLock lock(&mu_);
    if (connection.attached || clock_.Now() < connection.nonce_expiry) return absl::OkStatus();
    result = absl::DeadlineExceededError("no session was opened in time; connect again");
  }
  if (request.ok()) {
    result = Answer(peer, connection, std::move(*request));
    if (result.ok()) return result;
  }
  if (absl::IsUnavailable(result)) return result;
  CountRefusal(result);
  // After silence, what is no packet, or a packet of somebody else, the connection ends.
  const bool goes_on = request.ok() && ++failures < options_.max_failed_requests;
  const absl::Status sent =
      connection.channel.Send(Failed{std::string(result.message())}, {}, options_.send_timeout);
  return goes_on ? sent : result;
}

absl::Status DescriptorServer::Answer(const DescriptorPeer& peer, Connection& connection,
                                      ReceivedPacket request) {
  if (const auto* fetch = std::get_if<Fetch>(&request.packet)) {
    const absl::StatusOr<HandOver> what = hand_overs_.Take(peer.connection, fetch->token);
    if (!what.ok()) return what.status();
    return SendHandOver(connection, *what);
  }
  if (const auto* slabs = std::get_if<ReturnSlabs>(&request.packet)) {
    stats_.descriptors_returned.fetch_add(request.descriptors.size());
    auto next = std::make_move_iterator(request.descriptors.begin());
    for (const SlabEntry& entry : slabs->entries) {
      const auto first = std::exchange(next, next + slabs->pieces);
      const absl::Status returned = delegate_.ReturnSlab(peer, entry, SlabDescriptors(first, next));
      if (!returned.ok()) return returned;
    }
    return connection.channel.Send(Accepted{}, {}, options_.send_timeout);
  }
  if (const auto* image = std::get_if<ReturnImage>(&request.packet)) {
    stats_.descriptors_returned.fetch_add(1);
    const absl::Status returned =
        delegate_.ReturnImage(peer, image->fingerprint, std::move(request.descriptors[0]));
    if (!returned.ok()) return returned;
    return connection.channel.Send(Accepted{}, {}, options_.send_timeout);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("expected Fetch, ReturnSlabs or ReturnImage, got ", PacketName(request.packet)));
}

absl::Status DescriptorServer::SendHandOver(Connection& connection, const HandOver& what) {
  const auto total = static_cast<uint32_t>(what.descriptors.size() / what.pieces);
  const auto most = static_cast<uint32_t>(MaxPacketEntries(what.pieces));
  for (uint32_t first = 0; first < total;) {
    const uint32_t count = std::min(total - first, most);
    Descriptors packet{what.kind, 0, 1, {}, what.pieces};
    if (what.kind == DescriptorKind::kSlabs) {
      packet.first = first;
      packet.total = total;
      packet.entries.assign(what.entries.begin() + first, what.entries.begin() + first + count);
    }
    std::vector<int> descriptors;
    for (uint32_t i = first * what.pieces; i < (first + count) * what.pieces; ++i) {
      descriptors.push_back(what.descriptors[i]->get());
    }
    const absl::Status sent = connection.channel.Send(packet, descriptors, options_.send_timeout);
    // Half an answer cannot be taken back: the worker must start over on a new connection.
    if (!sent.ok()) return absl::UnavailableError(sent.message());
    stats_.descriptors_sent.fetch_add(descriptors.size());
    first += count;
  }
  return absl::OkStatus();
}

absl::StatusOr<DescriptorPeer> DescriptorServer::RedeemNonce(absl::string_view nonce) {
  const std::optional<Token> token = Token::FromBytes(nonce);
  const absl::Time now = clock_.Now();
  MutexLock lock(&mu_);
  const auto found = token.has_value() ? nonces_.find(*token) : nonces_.end();
  if (found == nonces_.end()) {
    return absl::UnauthenticatedError(
        "the nonce of Attach is not one that the descriptor socket gave out and still waits for: "
        "connect it first, and use each nonce once");
  }
  Connection& connection = *connections_.at(found->second);
  nonces_.erase(found);
  if (connection.nonce_expiry <= now) {
    return absl::UnauthenticatedError("the nonce of Attach has expired; connect again");
  }
  connection.attached = true;
  return *connection.peer;
}

bool DescriptorServer::IsOpen(ConnectionId connection) {
  MutexLock lock(&mu_);
  const auto found = connections_.find(connection);
  return found != connections_.end() && found->second->peer.has_value();
}

void DescriptorServer::Close(ConnectionId connection) {
  MutexLock lock(&mu_);
  const auto found = connections_.find(connection);
  if (found != connections_.end()) found->second->channel.Shutdown();
}

}  // namespace palimpsest
