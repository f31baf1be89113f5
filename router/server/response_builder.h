// One request's output on its way from worker messages to client messages: text in whole
// characters, stop strings held back, log-probabilities, usage. Survives a change of worker.
// Not thread-safe.
#ifndef PALIMPSEST_ROUTER_SERVER_RESPONSE_BUILDER_H_
#define PALIMPSEST_ROUTER_SERVER_RESPONSE_BUILDER_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "common/ids.h"
#include "common/text/detokenizer.h"
#include "proto/palimpsest/v1/router.pb.h"
#include "proto/palimpsest/v1/worker.pb.h"
#include "router/server/request_preparation.h"

namespace palimpsest::router {

class ResponseBuilder {
 public:
  // `request` must outlive the builder.
  explicit ResponseBuilder(const PreparedRequest& request);

  // Takes the worker's next message and returns what the client gets for it. INTERNAL if the worker
  // breaks its contract. Not to be called once finished().
  absl::StatusOr<v1::GenerateResponse> Add(const v1::WorkerGenerateResponse& message);

  // For an output whose worker is gone: whether nothing is missing but the word that it ended. If
  // so, `last` becomes the client's last message.
  bool FinishIfComplete(v1::GenerateResponse* last);

  // Whether the last returned message was the client's last one.
  bool finished() const { return finished_; }

  // Every token handed out so far.
  const std::vector<TokenId>& output() const { return output_; }

 private:
  void Finish(v1::FinishReason reason, v1::GenerateResponse* response);
  bool EndsOutput(TokenId id) const;

  const PreparedRequest& request_;
  Detokenizer detokenizer_;
  std::vector<TokenId> output_;
  v1::Usage usage_;
  bool first_ = true;
  bool finished_ = false;
};

}  // namespace palimpsest::router

#endif  // PALIMPSEST_ROUTER_SERVER_RESPONSE_BUILDER_H_
