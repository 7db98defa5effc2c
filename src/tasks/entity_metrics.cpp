#include "hasten/tasks/entity_metrics.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "hasten/base/error.h"
#include "hasten/base/text.h"

namespace hasten {

namespace detail {

/// seqeval reads a tag's first character, and the type after its first hyphen.
struct EntityTag {
  char mark = 'O';
  std::string type{};
};

EntityTag entity_tag(const std::string& tag) {
  const std::string rest = tag.substr(std::min<size_t>(1, tag.size()));
  const std::string type = rest.substr(std::min(rest.size(), rest.find('-') + 1));
  return {tag.empty() ? 'O' : tag[0], type.empty() ? "_" : type};
}

bool is_any(char mark, std::string_view of) { return of.find(mark) != std::string_view::npos; }

bool ends_entity(const EntityTag& before, const EntityTag& now) {
  return is_any(before.mark, "ES") || (is_any(before.mark, "BI") && is_any(now.mark, "BSO")) ||
         (!is_any(before.mark, "O.") && before.type != now.type);
}

bool begins_entity(const EntityTag& before, const EntityTag& now) {
  return is_any(now.mark, "BS") || (is_any(before.mark, "ESO") && is_any(now.mark, "EI")) ||
         (!is_any(now.mark, "O.") && before.type != now.type);
}

/// Counts of entities and words. state(): int64 [types + 1, 3]: right, predicted and true entities of
/// each type; then right words, words, 0.
class EntityMetrics final : public SumMetric {
 public:
  EntityMetrics(std::vector<std::string> labels, std::vector<std::string> types)
      : SumMetric("tasks::entity_metrics", {std::ssize(types) + 1, 3}, at::kLong),
        labels_(std::move(labels)),
        types_(std::move(types)) {}

  void update(const at::Tensor& outputs, const at::Tensor& labels) {
    if (outputs.dim() != 3 || labels.dim() != 2 || outputs.size(0) != labels.size(0) ||
        outputs.size(1) != labels.size(1) || outputs.size(2) != std::ssize(labels_)) {
      throw InputError(where_, c10::str("outputs=", outputs.sizes(), ", labels=", labels.sizes()),
                       c10::str("[B, T, ", labels_.size(), "] and [B, T]"));
    }
    const at::Tensor predicted = outputs.argmax(2).cpu().contiguous();
    const at::Tensor truth = labels.to(at::kCPU, at::kLong).contiguous();
    const int64_t length = truth.size(1);
    std::vector<std::string> predicted_tags, true_tags;
    for (int64_t row = 0; row < truth.size(0); ++row) {
      predicted_tags.clear();
      true_tags.clear();
      for (int64_t at = row * length; at < (row + 1) * length; ++at) {
        if (const int64_t label = truth.const_data_ptr<int64_t>()[at]; label != -100) {
          true_tags.push_back(name(label));
          predicted_tags.push_back(name(predicted.const_data_ptr<int64_t>()[at]));
          count(std::ssize(types_), 0) += true_tags.back() == predicted_tags.back();
          ++count(std::ssize(types_), 1);
        }
      }
      add(entities_of(predicted_tags), entities_of(true_tags));
    }
  }

  std::map<std::string, double> values() const {
    const at::Tensor all = sums_.slice(0, 0, std::ssize(types_)).sum(0);
    const auto* words = sums_[std::ssize(types_)].const_data_ptr<int64_t>();
    const auto scores = scores_of(all.const_data_ptr<int64_t>());
    return {{"precision", scores.at("precision").get<double>()},
            {"recall", scores.at("recall").get<double>()},
            {"f1", scores.at("f1").get<double>()},
            {"accuracy", ratio(words[0], words[1])}};
  }
  nlohmann::json per_class() const {
    nlohmann::json all = nlohmann::json::object();
    for (size_t type = 0; type < types_.size(); ++type) {
      all[types_[type]] = scores_of(sums_[static_cast<int64_t>(type)].const_data_ptr<int64_t>());
    }
    return all;
  }

 private:
  static double ratio(int64_t part, int64_t of) {
    return of == 0 ? 0 : static_cast<double>(part) / static_cast<double>(of);
  }
  static nlohmann::json scores_of(const int64_t* counts) {
    return {{"precision", ratio(counts[0], counts[1])},
            {"recall", ratio(counts[0], counts[2])},
            {"f1", ratio(2 * counts[0], counts[1] + counts[2])},
            {"support", counts[2]}};
  }
  int64_t& count(int64_t row, int64_t column) {
    return sums_.mutable_data_ptr<int64_t>()[3 * row + column];
  }
  const std::string& name(int64_t label) const {
    if (label < 0 || label >= std::ssize(labels_)) {
      throw InputError(where_, "label=" + std::to_string(label),
                       "-100, or 0 to " + std::to_string(labels_.size() - 1));
    }
    return labels_[static_cast<size_t>(label)];
  }
  void add(const std::vector<Entity>& predicted, const std::vector<Entity>& truth) {
    const auto type = [&](const Entity& entity) {
      return std::ranges::lower_bound(types_, entity.type) - types_.begin();
    };
    for (const Entity& entity : predicted) {
      ++count(type(entity), 1);
      count(type(entity), 0) += std::ranges::find(truth, entity) != truth.end();
    }
    for (const Entity& entity : truth) {
      ++count(type(entity), 2);
    }
  }

  std::vector<std::string> labels_; // [label]
  std::vector<std::string> types_; // sorted
};

class EntityEvaluation final : public EvaluationMetrics {
 public:
  EntityEvaluation(EntityMetrics metric, std::string labels_name)
      : metric_(std::move(metric)), labels_name_(std::move(labels_name)) {}

  void update(const at::Tensor& outputs, const Batch& batch) override {
    if (batch.has(labels_name_)) {
      metric_.update(outputs, batch[labels_name_]);
    }
  }
  std::vector<Metric*> metrics() override { return {&metric_}; }
  std::map<std::string, double> compute() const override { return metric_.values(); }
  nlohmann::json report() const override { return {{"per_class", metric_.per_class()}}; }

 private:
  EntityMetrics metric_;
  std::string labels_name_;
};

} // namespace detail

std::vector<Entity> entities_of(const std::vector<std::string>& tags) {
  std::vector<Entity> found;
  detail::EntityTag before;
  int64_t begin = 0;
  for (int64_t i = 0; i <= std::ssize(tags); ++i) {
    const detail::EntityTag now =
        detail::entity_tag(i < std::ssize(tags) ? tags[static_cast<size_t>(i)] : "O");
    if (detail::ends_entity(before, now)) {
      found.push_back({before.type, begin, i});
    }
    if (detail::begins_entity(before, now)) {
      begin = i;
    }
    before = now;
  }
  return found;
}

ComputeMetrics entity_metrics(std::vector<std::string> label_names, std::string labels_name) {
  std::vector<std::string> types;
  for (const std::string& label : label_names) {
    if (const detail::EntityTag tag = detail::entity_tag(label); !detail::is_any(tag.mark, "O.")) {
      types.push_back(tag.type);
    }
  }
  std::ranges::sort(types);
  types.erase(std::unique(types.begin(), types.end()), types.end());
  return detail::NamedFactory{
      {"f1", "precision", "recall", "accuracy"},
      [metric = detail::EntityMetrics(std::move(label_names), std::move(types)),
       labels_name = std::move(labels_name)] {
        return std::make_unique<detail::EntityEvaluation>(metric, labels_name);
      }};
}

} // namespace hasten
