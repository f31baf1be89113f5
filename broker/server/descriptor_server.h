// The broker's end of the descriptor socket: who a worker is, single-use nonces for Attach, and the
// descriptors that cross in either direction (common/descriptor_protocol.h has the conversation).
//
// Identity: the kernel's word for uid and pid; a process that cannot be watched (pid 0) is refused.
// A tenant is recognised by its secret, by its uid, or must show both if it has both; a socket may
// admit one tenant only.
//
// Bounds: so many connections in all, per tenant, and per uid before Hello, so that nobody can take
// all of them; Hello within a deadline; a session within the
// life of the nonce; so many failed requests, then the connection is closed. Every refusal says why
// and is counted (DescriptorServerStats).
//
// Threads: one accepts for each socket, one serves each connection. All methods are thread-safe.
// The delegate is called on a connection's thread, without locks.
#ifndef PALIMPSEST_BROKER_SERVER_DESCRIPTOR_SERVER_H_
#define PALIMPSEST_BROKER_SERVER_DESCRIPTOR_SERVER_H_

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "broker/core/slab_ledger.h"
#include "broker/server/hand_over.h"
#include "common/clock.h"
#include "common/descriptor_channel.h"
#include "common/mutex.h"
#include "common/random.h"

namespace palimpsest {

// How a tenant proves to be itself. At least one of uid and secret is set.
struct TenantCredentials {
  TenantId tenant;
  std::string name;
  std::optional<uid_t> uid;
  std::string secret;
};

// A process that has said Hello and was recognised. Stays valid after the connection closed.
struct DescriptorPeer {
  ConnectionId connection;
  TenantId tenant;
  uid_t uid = 0;
  std::shared_ptr<const ProcessHandle> process;
};

// What the broker's state has to say to a connection.
class DescriptorDelegate {
 public:
  virtual ~DescriptorDelegate() = default;

  // A worker returns a slab of an earlier broker process, or of this one after only the connection
  // broke. OK if it is that slab's memory; the reason otherwise.
  virtual absl::Status ReturnSlab(const DescriptorPeer& peer, const SlabEntry& entry,
                                  SlabDescriptors memory) = 0;
  virtual absl::Status ReturnImage(const DescriptorPeer& peer, const std::string& fingerprint,
                                   UniqueFd image) = 0;
  // The connection is closed. Called once for each peer, whether or not it opened a session.
  virtual void ConnectionClosed(const DescriptorPeer& peer) = 0;
};

struct DescriptorServerStats {
  std::atomic<uint64_t> accepted{0};
  std::atomic<uint64_t> welcomed{0};
  // Connections and requests refused: process or uid not to be known, secret or tenant wrong, token
  // not valid, and what breaks the protocol or its bounds.
  std::atomic<uint64_t> identity_refusals{0};
  std::atomic<uint64_t> secret_refusals{0};
  std::atomic<uint64_t> token_refusals{0};
  std::atomic<uint64_t> protocol_refusals{0};
  std::atomic<uint64_t> descriptors_sent{0};
  std::atomic<uint64_t> descriptors_returned{0};
  std::atomic<int64_t> open_connections{0};
};

class DescriptorServer {
 public:
  struct Socket {
    std::string path;
    // Only this tenant may use the socket; nullopt: every tenant.
    std::optional<TenantId> only;
    mode_t mode = 0660;
  };
  struct Options {
    std::vector<Socket> sockets;
    std::vector<TenantCredentials> tenants;
    size_t max_connections = 256;
    size_t max_connections_per_tenant = 8;
    // Of one uid, recognised as no tenant yet.
    size_t max_strangers_per_uid = 16;
    absl::Duration hello_timeout = absl::Seconds(5);
    absl::Duration send_timeout = absl::Seconds(5);
    absl::Duration nonce_lifetime = absl::Seconds(30);
    int max_failed_requests = 16;
  };

  // `delegate` and `hand_overs` must outlive the server.
  static absl::StatusOr<std::unique_ptr<DescriptorServer>> Start(Options options,
                                                                 const Clock& clock,
                                                                 HandOverTable& hand_overs,
                                                                 DescriptorDelegate& delegate);
  ~DescriptorServer();
  DescriptorServer(const DescriptorServer&) = delete;
  DescriptorServer& operator=(const DescriptorServer&) = delete;

  // Ends all connections and joins all threads. Idempotent.
  void Stop();

  // Who was given this nonce. Single use; from then on the connection has a session.
  // Unauthenticated if there is no such nonce, it was used, it expired, or its connection is
  // closed.
  absl::StatusOr<DescriptorPeer> RedeemNonce(absl::string_view nonce);

  // Whether the connection still stands. Once it does not, the delegate hears so, or has heard.
  bool IsOpen(ConnectionId connection);

  // Ends a connection (its session is over).
  void Close(ConnectionId connection);

  const DescriptorServerStats& stats() const { return stats_; }

 private:
  struct Connection {
    explicit Connection(DescriptorChannel connected) : channel(std::move(connected)) {}
    DescriptorChannel channel;
    std::optional<TenantId> only;
    std::thread thread;
    // The rest is guarded by the server's lock.
    std::optional<uid_t> stranger;  // from the identification until Hello was answered
    std::optional<DescriptorPeer> peer;
    Token nonce;
    absl::Time nonce_expiry;
    bool attached = false;
    bool finished = false;
  };

  DescriptorServer(Options options, const Clock& clock, HandOverTable& hand_overs,
                   DescriptorDelegate& delegate);

  void AcceptLoop(DescriptorListener& listener, std::optional<TenantId> only);
  void Admit(DescriptorChannel channel, std::optional<TenantId> only);
  void ReapFinished();
  void Serve(ConnectionId id, Connection& connection);
  // The conversation up to Welcome.
  absl::StatusOr<DescriptorPeer> Greet(ConnectionId id, Connection& connection);
  // Adds one to the counter that `refusal` belongs to.
  void CountRefusal(const absl::Status& refusal);
  absl::StatusOr<TenantId> Recognise(const Hello& hello, uid_t uid,
                                     std::optional<TenantId> only) const;
  absl::Status AdmitStranger(uid_t uid, Connection& connection);
  absl::Status Register(const DescriptorPeer& peer, Connection& connection);
  void Unregister(ConnectionId id, Connection& connection);
  // OK while the connection may go on.
  absl::Status ServeRequest(const DescriptorPeer& peer, Connection& connection, int& failures);
  absl::Status Answer(const DescriptorPeer& peer, Connection& connection, ReceivedPacket request);
  absl::Status SendHandOver(Connection& connection, const HandOver& what);

  const Options options_;
  const Clock& clock_;
  HandOverTable& hand_overs_;
  DescriptorDelegate& delegate_;
  DescriptorServerStats stats_;

  std::vector<DescriptorListener> listeners_;
  std::vector<std::thread> acceptors_;
  std::atomic<bool> stopping_{false};

  Mutex mu_;
  uint64_t next_connection_ ABSL_GUARDED_BY(mu_) = 1;
  absl::flat_hash_map<ConnectionId, std::unique_ptr<Connection>> connections_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<Token, ConnectionId> nonces_ ABSL_GUARDED_BY(mu_);
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_SERVER_DESCRIPTOR_SERVER_H_
