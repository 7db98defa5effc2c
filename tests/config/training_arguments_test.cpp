#include "hasten/config/training_arguments.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "hasten/base/error.h"
#include "hasten/config/training_plan.h"

namespace hasten {

namespace detail {

std::string validation_error(const TrainingArguments& arguments) {
  try {
    arguments.validate();
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

TrainingArguments valid_arguments() {
  TrainingArguments arguments;
  arguments.output_dir = "out";
  return arguments;
}

} // namespace detail

TEST(TrainingArguments, DefaultsAreValidOnceThereIsAnOutputFolder) {
  EXPECT_EQ(detail::validation_error(detail::valid_arguments()), "no error");
  EXPECT_EQ(
      detail::validation_error({}),
      "[trainer::training_arguments] output_dir=\"\". Expected a folder, or save_strategy=no.");
}

TEST(TrainingArguments, EachFieldOutOfRangeIsNamedWithItsValue) {
  using Change = void (*)(TrainingArguments&);
  const std::pair<const char*, Change> cases[] = {
      {"per_device_train_batch_size=0.",
       [](TrainingArguments& a) { a.per_device_train_batch_size = 0; }},
      {"per_device_eval_batch_size=-1.",
       [](TrainingArguments& a) { a.per_device_eval_batch_size = -1; }},
      {"gradient_accumulation_steps=0.",
       [](TrainingArguments& a) { a.gradient_accumulation_steps = 0; }},
      {"num_train_epochs=0.0.", [](TrainingArguments& a) { a.num_train_epochs = 0; }},
      {"max_steps=0.", [](TrainingArguments& a) { a.max_steps = 0; }},
      {"learning_rate=-1.0.", [](TrainingArguments& a) { a.learning_rate = -1; }},
      {"adam_beta2=1.0.", [](TrainingArguments& a) { a.adam_beta2 = 1; }},
      {"warmup_steps=1.5.", [](TrainingArguments& a) { a.warmup_steps = 1.5; }},
      {"warmup_ratio=2.0.", [](TrainingArguments& a) { a.warmup_ratio = 2; }},
      {"logging_steps=0.0.", [](TrainingArguments& a) { a.logging_steps = 0; }},
      {"eval_steps=2.5.", [](TrainingArguments& a) { a.eval_steps = 2.5; }},
      {"save_total_limit=-1.", [](TrainingArguments& a) { a.save_total_limit = -1; }},
      {"max_length=0.", [](TrainingArguments& a) { a.max_length = 0; }},
      {"max_grad_norm=-1.0.", [](TrainingArguments& a) { a.max_grad_norm = -1; }},
      {"max_grad_value=-0.5.", [](TrainingArguments& a) { a.max_grad_value = -0.5; }},
      {"memory_limit=\"2 TB of it\".",
       [](TrainingArguments& a) {
         a.auto_find_batch_size = true;
         a.memory_limit = "2 TB of it";
       }},
      {"memory_limit=2GB without auto_find_batch_size.",
       [](TrainingArguments& a) { a.memory_limit = "2GB"; }},
      {"auto_find_batch_size=true with gradient_checkpointing=budget:50%.",
       [](TrainingArguments& a) {
         a.auto_find_batch_size = true;
         a.gradient_checkpointing = "budget:50%";
       }},
  };
  for (const auto& [text, change] : cases) {
    TrainingArguments arguments = detail::valid_arguments();
    change(arguments);
    const std::string error = detail::validation_error(arguments);
    EXPECT_NE(error.find(text), std::string::npos) << text << "\n" << error;
  }
}

TEST(TrainingArguments, BestModelNeedsASaveForEachEvaluation) {
  TrainingArguments arguments = detail::valid_arguments();
  arguments.load_best_model_at_end = true;
  EXPECT_EQ(detail::validation_error(arguments), "no error");
  arguments.save_strategy = SaveStrategy::steps;
  EXPECT_NE(detail::validation_error(arguments).find("eval_strategy=epoch, save_strategy=steps"),
            std::string::npos);
  arguments.eval_strategy = IntervalStrategy::steps;
  arguments.eval_steps = 0.1;
  arguments.save_steps = 0.3;
  EXPECT_EQ(detail::validation_error(arguments), "no error");
  arguments.save_steps = 0.25;
  EXPECT_NE(detail::validation_error(arguments).find("multiple of eval_steps"), std::string::npos);
  arguments.eval_strategy = IntervalStrategy::no;
  EXPECT_NE(detail::validation_error(arguments).find("eval_strategy=no"), std::string::npos);
}

TEST(TrainingArguments, JsonKeepsEveryFieldAndOffersTheNearestName) {
  TrainingArguments arguments = detail::valid_arguments();
  arguments.data_seed = 7;
  arguments.eval_strategy = IntervalStrategy::steps;
  arguments.greater_is_better = false;
  arguments.learning_rate = 3e-4;
  const nlohmann::json json = arguments;
  EXPECT_EQ(json.at("eval_strategy"), "steps");
  const TrainingArguments again = nlohmann::json::parse(json.dump()).get<TrainingArguments>();
  EXPECT_EQ(nlohmann::json(again), json);
  EXPECT_EQ(again.order_seed(), 7u);
  EXPECT_EQ(again.greater_is_better, std::optional<bool>(false));

  const auto message = [](const char* text) -> std::string {
    try {
      nlohmann::json::parse(text).get<TrainingArguments>();
    } catch (const InputError& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_EQ(
      message(R"({"learning_rte": 1})"),
      "[trainer::training_arguments] unknown name: learning_rte=1. Fix: write learning_rate.");
  EXPECT_EQ(
      message(R"({"save_strategy": "never"})"),
      "[trainer::training_arguments] save_strategy=\"never\". Expected one of best, epoch, no, steps.");
  EXPECT_NE(message(R"({"seed": -1})").find("seed=-1"), std::string::npos);
  EXPECT_NE(message(R"({"max_steps": 1.5})").find("1.5"), std::string::npos);
}

TEST(TrainingArguments, BestMetricHasThePrefixAndTheDirectionOfItsName) {
  TrainingArguments arguments;
  EXPECT_EQ(arguments.best_metric_name(), "eval_loss");
  EXPECT_FALSE(arguments.best_is_greater());
  arguments.metric_for_best_model = "eval_f1";
  EXPECT_EQ(arguments.best_metric_name(), "eval_f1");
  EXPECT_TRUE(arguments.best_is_greater());
  arguments.greater_is_better = false;
  EXPECT_FALSE(arguments.best_is_greater());
  arguments.greater_is_better.reset();
  for (const char* error : {"perplexity", "eval_mse", "mae"}) {
    arguments.metric_for_best_model = error;
    EXPECT_FALSE(arguments.best_is_greater()) << error;
  }
}

TEST(TrainingPlan, CountsUpdatesAsHuggingFaceDoes) {
  TrainingArguments arguments;
  arguments.gradient_accumulation_steps = 4;
  arguments.num_train_epochs = 2.5;
  arguments.warmup_ratio = 0.1;
  TrainingPlan plan = make_training_plan(arguments, 10);
  EXPECT_EQ(plan.steps_per_epoch, 3); // 4, 4 and a short window of 2
  EXPECT_EQ(plan.max_steps, 8); // ceil(7.5)
  EXPECT_EQ(plan.epochs, 3);
  EXPECT_EQ(plan.warmup_steps, 1); // ceil(0.8)
  EXPECT_EQ(plan.logging_steps, 1); // never less than one step
  EXPECT_EQ(plan.eval_steps, 500);

  arguments.max_steps = 1000;
  arguments.warmup_steps = 30; // replaces warmup_ratio
  arguments.save_steps = 0.25;
  plan = make_training_plan(arguments, 10);
  EXPECT_EQ(plan.max_steps, 1000);
  EXPECT_EQ(plan.epochs, 334);
  EXPECT_EQ(plan.warmup_steps, 30);
  EXPECT_EQ(plan.logging_steps, 10);
  EXPECT_EQ(plan.save_steps, 250);
  EXPECT_THROW(make_training_plan(arguments, 0), InputError);
}

TEST(TrainingPlan, EvaluationsLeftAreThoseDueAfterAStepAndAtTheEnd) {
  TrainingPlan plan;
  plan.steps_per_epoch = 10;
  plan.max_steps = 25; // two epochs and a half
  const auto after = [&](IntervalStrategy strategy, int64_t done) {
    return times_after(plan, strategy, 4, done);
  };
  EXPECT_EQ(after(IntervalStrategy::epoch, -1), 3); // none yet: 10, 20, 25
  EXPECT_EQ(after(IntervalStrategy::epoch, 9), 3);
  EXPECT_EQ(after(IntervalStrategy::epoch, 10), 2); // that of step 10 is done
  EXPECT_EQ(after(IntervalStrategy::epoch, 24), 1);
  EXPECT_EQ(after(IntervalStrategy::epoch, 25), 0);
  EXPECT_EQ(after(IntervalStrategy::steps, 0), 7); // 4, 8, … 24, 25
  EXPECT_EQ(after(IntervalStrategy::steps, 8), 5);
  EXPECT_EQ(after(IntervalStrategy::no, 0), 0);
  plan.max_steps = 24;
  EXPECT_EQ(after(IntervalStrategy::steps, 0), 6); // the last step is one of them
  plan.step_shift = 5; // epochs end at 5, 15 and 25
  EXPECT_EQ(after(IntervalStrategy::epoch, 0), 3); // 5, 15, 24
  EXPECT_EQ(after(IntervalStrategy::epoch, 5), 2);
  EXPECT_EQ(after(IntervalStrategy::steps, 5), 5); // 8, 12, 16, 20, 24
}

TEST(TrainingPlan, SecondsLeftAreThoseOfStepsEvaluationsAndSavesEachAtItsMean) {
  // 10 of 30 steps in 5 s, one of 3 evaluations in 7 s, one of 3 saves in 1 s.
  EXPECT_DOUBLE_EQ(seconds_for({{10, 5, 20}, {1, 7, 2}, {1, 1, 2}}), 10 + 14 + 2);
  EXPECT_DOUBLE_EQ(seconds_for({{10, 5, 20}, {0, 0, 3}}), 10); // not measured yet
  EXPECT_EQ(seconds_for({{30, 15, 0}, {3, 21, 0}}), 0);
}

} // namespace hasten
