#include <gtest/gtest.h>

#include <variant>

#include "commands.h"
#include "hasten/models/pretrained_config.h"

namespace hasten {

TEST(ModelShapes, TheCommandLineTakesThoseThatTheModelsHave) {
  EXPECT_EQ(model_shapes_text(), AutoConfig::shapes_text());
  const Command help = parse_command_line({"train", "--help"});
  for (const std::string& shape : model_shapes()) {
    EXPECT_TRUE(AutoConfig::is_shape(shape)) << shape;
    EXPECT_NE(std::get<Answer>(help).text.find(shape), std::string::npos);
  }
}

} // namespace hasten
