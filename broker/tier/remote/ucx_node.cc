#include "broker/tier/remote/ucx_node.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <ucp/api/ucp.h>

#include <algorithm>
#include <cassert>
#include <cstring>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/monotonic_time.h"

namespace palimpsest {
namespace {

constexpr unsigned kMessage = 1;  // the id of the only kind of active messages
// How long the destructor drives links that are being closed.
constexpr absl::Duration kClosing = absl::Seconds(10);

absl::Status ToStatus(ucs_status_t status, absl::string_view what) {
  if (status == UCS_OK) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(what, ": ", ucs_status_string(status)));
}

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;
};

absl::StatusOr<SocketAddress> ParseAddress(const std::string& text) {
  const size_t colon = text.rfind(':');
  std::string host = text.substr(0, colon);
  if (absl::StartsWith(host, "[") && absl::EndsWith(host, "]"))
    host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (colon == std::string::npos ||
      ::getaddrinfo(host.c_str(), text.c_str() + colon + 1, &hints, &found) != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", text,
        "' is no address of a node's memory; expected a numeric one with its port, such "
        "as 10.0.0.1:7400"));
  }
  SocketAddress address;
  std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  address.size = found->ai_addrlen;
  ::freeaddrinfo(found);
  return address;
}

std::string FormatAddress(const sockaddr_storage& storage) {
  char host[NI_MAXHOST], port[NI_MAXSERV];
  if (::getnameinfo(reinterpret_cast<const sockaddr*>(&storage), sizeof storage, host, sizeof host,
                    port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "";
  }
  return storage.ss_family == AF_INET6 ? absl::StrCat("[", host, "]:", port)
                                       : absl::StrCat(host, ":", port);
}

}  // namespace

class UcxNode::Link {
 public:
  Impl* node = nullptr;
  ucp_ep_h endpoint = nullptr;
  size_t under_way = 0;
  bool closing = false;
  absl::Status why;
  ucs_status_ptr_t close_request = nullptr;
};

struct UcxNode::Impl {
  // One operation of UCX.
  struct Operation {
    Link* link = nullptr;
    const char* what = "";
    std::string header;
    Done done;
  };

  ~Impl();
  absl::Status Init(const std::string& transports);
  absl::StatusOr<Link*> MakeLink(ucp_ep_params_t* params);
  // With what UCX answered to the call that began it.
  void Began(Operation* operation, ucs_status_ptr_t answer);
  static void Ended(Operation* operation, ucs_status_t status);
  ucp_request_param_t Parameters(Operation* operation) const;
  void MarkClosing(Link* link, absl::Status why);
  bool DriveClose(Link* link);
  void Reap();
  bool Progress();

  static void OnSent(void* request, ucs_status_t status, void* operation);
  static void OnReceived(void* request, ucs_status_t status, size_t size, void* operation);
  static void OnError(void* link, ucp_ep_h endpoint, ucs_status_t status);
  static void OnConnection(ucp_conn_request_h request, void* node);
  static ucs_status_t OnActiveMessage(void* node, const void* header, size_t header_size,
                                      void* data, size_t size, const ucp_am_recv_param_t* param);

  Handler* handler = nullptr;  // null while the node is destroyed
  ucp_context_h context = nullptr;
  ucp_worker_h worker = nullptr;
  ucp_listener_h listener = nullptr;
  int event_fd = -1;
  absl::flat_hash_map<ucp_ep_h, std::unique_ptr<Link>> links;
};

UcxNode::Impl::~Impl() {
  handler = nullptr;
  for (auto& [endpoint, link] : links) MarkClosing(link.get(), absl::CancelledError("closed"));
  const absl::Time give_up = MonotonicNow() + kClosing;
  while (!links.empty() && MonotonicNow() < give_up) {
    Progress();
    Reap();
  }
  if (listener != nullptr) ucp_listener_destroy(listener);
  if (worker != nullptr) ucp_worker_destroy(worker);
  if (context != nullptr) ucp_cleanup(context);
}

absl::Status UcxNode::Impl::Init(const std::string& transports) {
  ucp_config_t* config = nullptr;
  ucs_status_t status = ucp_config_read(nullptr, nullptr, &config);
  if (status != UCS_OK) return ToStatus(status, "UCX cannot read its configuration");
  status = ucp_config_modify(config, "TLS", transports.c_str());
  // A process that was just restarted listens where it did before.
  if (status == UCS_OK) status = ucp_config_modify(config, "CM_REUSEADDR", "y");
  // Whoever puts into a peer over TCP is aborted by an assertion of UCX 1.13 when the peer dies
  // (tcp_ep.c, PUT_TX_WAITING_ACK); messages are not.
  if (status == UCS_OK) status = ucp_config_modify(config, "PUT_ENABLE", "n");
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  if (status == UCS_OK) status = ucp_init(&params, config, &context);
  ucp_config_release(config);
  if (status != UCS_OK) {
    context = nullptr;
    return ToStatus(status, absl::StrCat("UCX does not begin with the transports ", transports));
  }
  ucp_worker_params_t worker_params{};
  worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker_params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  status = ucp_worker_create(context, &worker_params, &worker);
  if (status != UCS_OK) {
    worker = nullptr;
    return ToStatus(status, "UCX makes no worker");
  }
  ucp_am_handler_param_t on_message{};
  on_message.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                          UCP_AM_HANDLER_PARAM_FIELD_ARG;
  on_message.id = kMessage;
  on_message.cb = OnActiveMessage;
  on_message.arg = this;
  status = ucp_worker_set_am_recv_handler(worker, &on_message);
  if (status == UCS_OK) status = ucp_worker_get_efd(worker, &event_fd);
  return ToStatus(status, "UCX cannot wait for messages");
}

absl::StatusOr<UcxNode::Link*> UcxNode::Impl::MakeLink(ucp_ep_params_t* params) {
  auto link = std::make_unique<Link>();
  link->node = this;
  params->field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params->err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params->err_handler = {.cb = OnError, .arg = link.get()};
  const ucs_status_t status = ucp_ep_create(worker, params, &link->endpoint);
  if (status != UCS_OK) return ToStatus(status, "no connection to another node's memory");
  Link* const made = link.get();
  links.emplace(made->endpoint, std::move(link));
  return made;
}

void UcxNode::Impl::OnError(void* link, ucp_ep_h, ucs_status_t status) {
  auto* const broken = static_cast<Link*>(link);
  broken->node->MarkClosing(broken, ToStatus(status, "the connection to another node broke"));
}

void UcxNode::Impl::OnConnection(ucp_conn_request_h request, void* node) {
  auto* const self = static_cast<Impl*>(node);
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST;
  params.conn_request = request;
  const absl::StatusOr<Link*> link = self->MakeLink(&params);
  if (!link.ok()) return;
  if (self->handler == nullptr || !self->handler->OnAccepted(*link)) {
    self->MarkClosing(*link, absl::ResourceExhaustedError("not wanted"));
  }
}

ucs_status_t UcxNode::Impl::OnActiveMessage(void* node, const void* header, size_t header_size,
                                            void* data, size_t size,
                                            const ucp_am_recv_param_t* param) {
  auto* const self = static_cast<Impl*>(node);
  if ((param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) == 0) return UCS_OK;
  const auto found = self->links.find(param->reply_ep);
  if (found == self->links.end() || self->handler == nullptr) return UCS_OK;
  Link* const link = found->second.get();
  if (link->closing) return UCS_OK;
  if (header_size > kMaxHeader) {
    self->MarkClosing(link, absl::InvalidArgumentError("a message's header is too long"));
    return UCS_OK;
  }
  self->handler->OnMessage(link, {static_cast<const char*>(header), header_size},
                           {.size = size,
                            .data = data,
                            .rendezvous = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0});
  return UCS_OK;
}

void UcxNode::Impl::MarkClosing(Link* link, absl::Status why) {
  if (link->closing) return;
  link->closing = true;
  link->why = std::move(why);
}

// True when UCX is done with the link. Closing calls back for everything that is under way, so
// that it is not begun from within a call of UCX's.
bool UcxNode::Impl::DriveClose(Link* link) {
  if (link->endpoint != nullptr) {
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_EP_CLOSE_FLAG_FORCE;
    link->close_request = ucp_ep_close_nbx(std::exchange(link->endpoint, nullptr), &param);
    if (UCS_PTR_IS_ERR(link->close_request)) link->close_request = nullptr;
  }
  if (link->close_request != nullptr) {
    if (ucp_request_check_status(link->close_request) == UCS_INPROGRESS) return false;
    ucp_request_free(std::exchange(link->close_request, nullptr));
  }
  return link->under_way == 0;
}

void UcxNode::Impl::Reap() {
  std::vector<ucp_ep_h> closing;
  for (const auto& [endpoint, link] : links) {
    if (link->closing) closing.push_back(endpoint);
  }
  for (ucp_ep_h endpoint : closing) {
    const auto found = links.find(endpoint);
    if (!DriveClose(found->second.get())) continue;
    const std::unique_ptr<Link> ended = std::move(found->second);
    links.erase(found);
    if (handler != nullptr) handler->OnClosed(ended.get(), ended->why);
  }
}

bool UcxNode::Impl::Progress() {
  bool any = false;
  while (ucp_worker_progress(worker) != 0) any = true;
  return any;
}

ucp_request_param_t UcxNode::Impl::Parameters(Operation* operation) const {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.user_data = operation;
  ++operation->link->under_way;
  return param;
}

void UcxNode::Impl::Ended(Operation* operation, ucs_status_t status) {
  const std::unique_ptr<Operation> owned(operation);
  --owned->link->under_way;
  owned->done(ToStatus(status, owned->what));
}

void UcxNode::Impl::Began(Operation* operation, ucs_status_ptr_t answer) {
  if (answer == nullptr) {
    Ended(operation, UCS_OK);
  } else if (UCS_PTR_IS_ERR(answer)) {
    Ended(operation, UCS_PTR_STATUS(answer));
  }
}

void UcxNode::Impl::OnSent(void* request, ucs_status_t status, void* operation) {
  ucp_request_free(request);
  Ended(static_cast<Operation*>(operation), status);
}

void UcxNode::Impl::OnReceived(void* request, ucs_status_t status, size_t, void* operation) {
  OnSent(request, status, operation);
}

UcxNode::UcxNode(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
UcxNode::~UcxNode() = default;

absl::StatusOr<std::unique_ptr<UcxNode>> UcxNode::Make(const std::string& transports,
                                                       Handler* handler) {
  auto impl = std::make_unique<Impl>();
  if (absl::Status status = impl->Init(transports); !status.ok()) return status;
  impl->handler = handler;
  return std::unique_ptr<UcxNode>(new UcxNode(std::move(impl)));
}

absl::StatusOr<std::string> UcxNode::Listen(const std::string& address) {
  const absl::StatusOr<SocketAddress> parsed = ParseAddress(address);
  if (!parsed.ok()) return parsed.status();
  ucp_listener_params_t params{};
  params.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER;
  params.sockaddr = {reinterpret_cast<const sockaddr*>(&parsed->storage), parsed->size};
  params.conn_handler = {.cb = Impl::OnConnection, .arg = impl_.get()};
  ucs_status_t status = ucp_listener_create(impl_->worker, &params, &impl_->listener);
  if (status != UCS_OK) {
    impl_->listener = nullptr;
    return ToStatus(status, absl::StrCat("cannot listen at ", address));
  }
  ucp_listener_attr_t attributes{};
  attributes.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR;
  status = ucp_listener_query(impl_->listener, &attributes);
  if (status != UCS_OK) return ToStatus(status, "UCX does not say where it listens");
  return FormatAddress(attributes.sockaddr);
}

absl::StatusOr<UcxNode::Link*> UcxNode::Connect(const std::string& address) {
  const absl::StatusOr<SocketAddress> parsed = ParseAddress(address);
  if (!parsed.ok()) return parsed.status();
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR;
  params.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
  params.sockaddr = {reinterpret_cast<const sockaddr*>(&parsed->storage), parsed->size};
  return impl_->MakeLink(&params);
}

void UcxNode::Send(Link* link, std::string header, absl::Span<const std::byte> payload, Done done) {
  assert(header.size() <= kMaxHeader);
  if (link->closing) return done(link->why);
  auto* const operation = new Impl::Operation{.link = link,
                                              .what = "a message was not sent",
                                              .header = std::move(header),
                                              .done = std::move(done)};
  ucp_request_param_t param = impl_->Parameters(operation);
  param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_AM_SEND_FLAG_REPLY;
  if (!payload.empty()) param.flags |= UCP_AM_SEND_FLAG_RNDV;
  param.cb.send = Impl::OnSent;
  impl_->Began(operation,
               ucp_am_send_nbx(link->endpoint, kMessage, operation->header.data(),
                               operation->header.size(), payload.data(), payload.size(), &param));
}

void UcxNode::Receive(Link* link, const Payload& payload, absl::Span<std::byte> to, Done done) {
  assert(to.size() == payload.size);
  if (!payload.rendezvous) {
    if (!to.empty()) std::memcpy(to.data(), payload.data, to.size());
    return done(absl::OkStatus());
  }
  auto* const operation = new Impl::Operation{
      .link = link, .what = "a block was not received", .done = std::move(done)};
  ucp_request_param_t param = impl_->Parameters(operation);
  param.cb.recv_am = Impl::OnReceived;
  impl_->Began(operation,
               ucp_am_recv_data_nbx(impl_->worker, payload.data, to.data(), to.size(), &param));
}

void UcxNode::Close(Link* link, absl::Status why) { impl_->MarkClosing(link, std::move(why)); }

size_t UcxNode::UnderWay(const Link* link) { return link->under_way; }

void UcxNode::RunOnce(absl::Time deadline) {
  const bool any = impl_->Progress();
  impl_->Reap();
  if (any || ucp_worker_arm(impl_->worker) != UCS_OK) return;
  // What is being closed is asked about, as it wakes nobody.
  for (const auto& [endpoint, link] : impl_->links) {
    if (link->closing) deadline = std::min(deadline, MonotonicNow() + absl::Milliseconds(1));
  }
  const absl::Duration left =
      std::clamp(deadline - MonotonicNow(), absl::ZeroDuration(), absl::Duration(absl::Minutes(1)));
  pollfd wait = {.fd = impl_->event_fd, .events = POLLIN, .revents = 0};
  ::poll(&wait, 1,
         static_cast<int>(absl::ToInt64Milliseconds(absl::Ceil(left, absl::Milliseconds(1)))));
}

void UcxNode::Wake() { ucp_worker_signal(impl_->worker); }

}  // namespace palimpsest
