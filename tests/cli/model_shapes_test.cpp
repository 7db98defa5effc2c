#include <gtest/gtest.h>

#include <variant>

#include "commands.h"
#include "hasten/models/bert.h"

namespace hasten {

TEST(ModelShapes, TheCommandLineTakesThoseThatTheModelsHave) {
  EXPECT_EQ(model_shapes_text(), BertConfig::shapes_text());
  const Command help = parse_command_line({"train", "--help"});
  for (const std::string& shape : model_shapes()) {
    EXPECT_TRUE(BertConfig::is_shape(shape)) << shape;
    EXPECT_NE(std::get<Answer>(help).text.find(shape), std::string::npos);
  }
}

} // namespace hasten
