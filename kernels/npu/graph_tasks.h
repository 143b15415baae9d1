// Launches whose arguments on the host change from replay to replay of a captured graph: lengths of attention.
//
// Each is a task group of the graph, behind an event that the graph waits for. Before every replay ends it is launched
// once more, within an update of that group, on another stream, which then records the event. Source: torch_npu's
// graph_task_group_begin and graph_task_update_begin.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace liteboost::npu {

// Whether this thread captures or renews such launches.
bool is_renewable();

// Whether attention is told the length of keys also where it reads all that are there: while this thread captures or renews
// such launches, for the next replay may read fewer, and in the run before, in which the same calls are compared.
bool tells_lengths();

// `launch(out, lse)`: at once; as a task group, where renewable launches are captured; where they are renewed, in the
// place of the one that was captured, with the outputs of that.
void launch_renewable(const at::Tensor& out, const at::Tensor& lse,
                      const std::function<void(const at::Tensor&, const at::Tensor&)>& launch);

// What a renewable launch reads beside what is captured, such as a mask: what `make` gives, once for all that ask for
// `key` in one renewal, and kept until the next one. Of no defined contents where launches are captured: they are
// renewed before they run.
at::Tensor made_for_renewal(const std::vector<int64_t>& key, const at::IntArrayRef& sizes,
                            const at::TensorOptions& options, const std::function<at::Tensor()>& make);

// What a captured launch behind a renewable one reads that is another in every step: what `make` gives, of `sizes`. Where
// launches are captured, memory that is filled in every renewal, once for all that asked for `key` in the capture: ask
// before the renewable launch, which the captured ones wait for.
at::Tensor filled_in_renewal(const std::vector<int64_t>& key, const at::IntArrayRef& sizes,
                             const at::TensorOptions& options, const std::function<at::Tensor()>& make);

// Whether this thread renews launches: what was captured behind them is not launched again.
bool is_renewing();

// Throws where this thread captures or renews launches and `reads_in_place` is false: what `what` would be copied from
// is written by the graph.
void check_reads_in_place(bool reads_in_place, const char* what);

// Throws where this thread captures or renews launches: the reference of `op`, called because of `why`, has none that could
// be renewed.
void check_reference(const char* op, const char* why);

// Throws where this thread renews launches and is not inside of one: `name` would be launched beside the graph.
void check_launch(const char* name);

// Memory for a launch that is renewed; null where this thread renews none. It is the graph's own: that of the stream
// may move between two launches of one replay.
void* workspace_of_renewed(uint64_t size);

}  // namespace liteboost::npu
