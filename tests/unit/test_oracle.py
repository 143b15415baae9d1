"""The reader of the operators' unit tests, on tests of our own writing."""

from __future__ import annotations

import pytest
from cann_sim.oracle.overruled import overruling
from cann_sim.oracle.phase1 import verdict
from cann_sim.oracle.sets import sets_of
from cann_sim.oracle.syntax import number
from cann_sim.oracle.tilings import arguments_of, operator_of
from cann_sim.oracle.tokens import Unreadable, tokens_of
from cann_sim.oracle.values import ParameterSet, Tensor


def read(text, tables=None):
    return sets_of(text, "op/tests/ut/op_api/test_op.cpp", (tables or {}).get)


def only(text, tables=None):
    sets, failures = read(text, tables)
    assert not failures
    assert len(sets) == 1
    return sets[0]


def test_tokens_leave_out_comments_and_directives():
    text = '#include "a.h"\nint x = 0x1F; // one\n/* two\n */ auto s = R"(raw "text")" "more\\n";'
    assert [t.text for t in tokens_of(text)] == [
        *("int", "x", "=", "0x1F", ";", "auto", "s", "=", 'raw "text"', "more\n", ";"),
    ]
    assert [number(t) for t in ("0x1F", "16UL", "1'000", "1e-3f", "010")] == [31, 16, 1000, 0.001, 8]


def test_a_call_with_what_it_expects():
    one = only("""
        TEST_F(suite, ascend910B2_plain) {
            auto x = TensorDesc({2, 8}, ACL_FLOAT16, ACL_FORMAT_ND, {1, 2}, 0, {8, 2});
            auto out = TensorDesc({2, 4}, ACL_BF16, ACL_FORMAT_ND).Precision(0.1, 0.1);
            uint64_t size = 0;
            auto ut = OP_API_UT(aclnnFoo, INPUT(x, nullptr, -1.5f), OUTPUT(out), int8_t(1));
            aclnnStatus ret = ut.TestGetWorkspaceSize(&size);
            EXPECT_EQ(ret, ACLNN_ERR_PARAM_INVALID);
        }""")
    x, null, factor, out, mode = one.arguments
    assert x == Tensor([2, 8], "ACL_FLOAT16", "ACL_FORMAT_ND", [1, 2], 0, [8, 2])
    assert (null, factor, mode) == (None, -1.5, 1)
    assert (out.shape, out.dtype) == ([2, 4], "ACL_BF16")
    assert (one.operator, one.soc, one.accepted) == ("aclnnFoo", "910B", False)


@pytest.mark.parametrize(
    ("check", "accepted"),
    [
        ("EXPECT_EQ(ret, ACL_SUCCESS)", True),
        ("ASSERT_EQ(ACLNN_ERR_PARAM_NULLPTR, ret)", False),
        ("EXPECT_NE(ret, ACLNN_SUCCESS)", False),
        ("bool ok = (ret == ACLNN_SUCCESS); EXPECT_EQ(ok, true)", True),
        ("bool bad = (ret == ACLNN_ERR_PARAM_INVALID); EXPECT_TRUE(bad)", False),
        ("EXPECT_EQ(ret, ACLNN_ERR_INNER_NULLPTR)", None),  # of the test bench, not of the arguments
        ("if (ret == ACL_SUCCESS) { ut.TestPrecision(); }", None),
    ],
)
def test_expectations(check, accepted):
    call = "auto ut = OP_API_UT(aclnnFoo, INPUT(1), OUTPUT()); auto ret = ut.TestGetWorkspaceSize(&size);"
    assert only(f"TEST(suite, name) {{ {call} {check}; }}").accepted is accepted


def test_helpers_loops_and_values_are_followed():
    one = only("""
        static vector<int64_t> Strides(const vector<int64_t> &shape) {
            vector<int64_t> strides(shape.size(), 1);
            for (int64_t i = shape.size() - 2; i >= 0; i--) { strides[i] = shape[i + 1] * strides[i + 1]; }
            return strides;
        }
        class suite : public testing::Test {
         protected:
            void Run(vector<int64_t> shape, aclnnStatus want = ACLNN_SUCCESS) {
                auto strides = Strides(shape);
                swap(strides[0], strides[1]);
                shape.push_back(static_cast<int64_t>(ceil(7 / 2.0)));
                auto x = aclCreateTensor(shape.data(), shape.size(), ACL_INT8, strides.data(), 0,
                                         ACL_FORMAT_ND, shape.data(), shape.size(), nullptr);
                aclnnStatus ret = aclnnFooGetWorkspaceSize(x, shape.size() > 2 ? 5 : 6, &size, &executor);
                EXPECT_EQ(ret, want);
            }
        };
        TEST_F(suite, name) { Run({3, 2}); }""")
    x, count = one.arguments
    assert (x.shape, x.strides, count) == ([3, 2, 4], [1, 2], 5)
    assert one.accepted


PARAMETERS = """
    struct Case { string name; vector<int64_t> shape; bool given = true; aclnnStatus want; };
    static void Test(const Case &c) {
        TensorDesc x = TensorDesc(c.shape, ACL_FLOAT, ACL_FORMAT_ND);
        aclnnStatus ret = 0;
        switch (c.shape.size()) {
            case 1: ret = OP_API_UT(aclnnFoo, INPUT(x), OUTPUT()).TestGetWorkspaceSize(&size); break;
            default: ret = OP_API_UT(aclnnBar, INPUT(x), OUTPUT()).TestGetWorkspaceSize(&size);
        }
        EXPECT_EQ(ret, c.want);
    }
    static void Threads(const Case *all, size_t count) { std::thread threads[3]; Test(all[0]); }
    TEST_P(suite_310P, general) { Test(GetParam()); }
    TEST_F(suite_310P, threads) { Threads(cases, sizeof(cases) / sizeof(Case)); }
    static Case cases[] = {{"one", {4}, true, ACL_SUCCESS}, {"two", {4, 4}, false, ACLNN_ERR_PARAM_INVALID}};
    INSTANTIATE_TEST_SUITE_P(Some, suite_310P, testing::ValuesIn(cases));
"""


def test_tables_of_parameters_and_no_second_time_in_threads():
    sets, failures = read(PARAMETERS)
    assert not failures
    assert [(s.operator, s.accepted, s.soc) for s in sets] == [
        ("aclnnFoo", True, "310P"),
        ("aclnnBar", False, "310P"),
    ]
    assert sets[1].name.endswith("/two")


def test_a_table_in_a_file():
    text = """
        struct Case { string name; vector<int64_t> shape; bool want; };
        static vector<Case> Cases() {
            vector<Case> cases;
            std::ifstream file(ut_str::GetExeDirPath() + "../../op/tests/ut/op_api/table.csv");
            std::string line;
            while (std::getline(file, line)) {
                vector<string> columns;
                SplitStr2Vec(line, ",", columns);
                if (columns[0] == "name") { continue; }
                size_t idx = 0;
                Case one;
                one.name = columns[idx++];
                one.shape = ParseInt64Vec(columns[idx++]);
                one.want = columns[idx++] == "TRUE";
                cases.push_back(one);
            }
            return cases;
        }
        TEST_P(suite, name) {
            auto c = GetParam();
            gert::TilingContextPara para("Foo", {{{c.shape, c.shape}, ge::DT_INT8, ge::FORMAT_ND}}, {},
                                         {{"k", Ops::NN::AnyValue::CreateFrom<int64_t>(2)}}, &info,
                                         "Ascend910_93");
            ExecuteTestCase(para, c.want ? ge::GRAPH_SUCCESS : ge::GRAPH_FAILED);
        }
        INSTANTIATE_TEST_SUITE_P(All, suite, testing::ValuesIn(Cases()));"""
    sets, failures = read(
        text, {"../../op/tests/ut/op_api/table.csv": "name,shape,want\na,2 3,TRUE\nb,4 5,FALSE\n"}
    )
    assert not failures
    assert [(s.inputs[0].shape, s.accepted, s.soc) for s in sets] == [
        ([2, 3], True, "910C"),
        ([4, 5], False, "910C"),
    ]
    assert sets[0].attributes == {"k": 2}


@pytest.mark.parametrize("named", ["commTurn,expectResult", "comm_turn,expect_result"])
def test_a_table_whose_columns_are_the_parameters(named):
    text = """
        static std::vector<Case> cases = GetCasesFromCsv<Case>(ReplaceFileExtension2Csv(__FILE__));
        TEST_P(suite, name) {
            auto c = GetParam();
            auto ret = OP_API_UT(aclnnFoo, INPUT(c.x1, c.commTurn), OUTPUT()).TestGetWorkspaceSize(&size);
            EXPECT_EQ(ret, c.expectResult);
        }
        INSTANTIATE_TEST_SUITE_P(All, suite, testing::ValuesIn(cases));"""
    rows = [f"case_name,x1_shape,x1_dtype,x1_format,{named}", "one,2 3,INT8,ND,8,SUCCESS"]
    table = "\n".join([*rows, "two,4,INT8,ND,8,PARAM_INVALID", ""])
    sets, failures = read(text, {"op/tests/ut/op_api/test_op.csv": table})
    assert not failures
    assert [(s.arguments[0].shape, s.arguments[1], s.accepted) for s in sets] == [
        ([2, 3], 8, True),
        ([4], 8, False),
    ]


def test_a_tiling_context_that_is_built_by_a_chain():
    one = only("""
        TEST_F(suite, name) {
            gert::StorageShape x = {{8, 16}, {8, 16}};
            map<string, string> version = {{"NpuArch", "2002"}};
            std::string type("Foo");
            auto tiling = gert::OpImplRegistry::GetInstance().GetOpImpl(type.c_str())->tiling;
            auto holder = gert::TilingContextFaker().InputShapes({&x, nullptr}).OutputShapes({&x})
                .NodeInputTd(0, ge::DT_BF16, ge::FORMAT_ND, ge::FORMAT_FRACTAL_NZ)
                .NodeInputTd(1, ge::DT_BF16, ge::FORMAT_ND, ge::FORMAT_ND)
                .NodeOutputTd(0, ge::DT_INT8, ge::FORMAT_ND, ge::FORMAT_ND).Build();
            auto context = holder.GetContext<gert::TilingContext>();
            context->GetPlatformInfo()->SetPlatformRes("version", version);
            EXPECT_EQ(tiling(context), ge::GRAPH_FAILED);
            for (size_t i = 0; i < context->GetTilingDataSize(); i++) {}
        }""")
    assert (one.operator, one.accepted, one.soc) == ("Foo", False, "310P")
    assert one.inputs == [Tensor([8, 16], "DT_BF16", "FORMAT_FRACTAL_NZ", storage=[8, 16]), None]
    assert one.outputs[0].dtype == "DT_INT8"


def test_what_cannot_be_followed_is_told():
    sets, failures = read("""
        TEST_F(suite, good) { auto r = OP_API_UT(aclnnFoo, INPUT(1), OUTPUT()).TestGetWorkspaceSize(&s); }
        TEST_F(suite, bad) { if (SomethingOfTheBench()) { return; } }
        TEST_F(suite, strange) { do { x(); } while (true); }""")
    assert [s.name for s in sets] == ["suite.good"]
    assert [name for name, _ in failures] == ["suite.bad", "suite.strange"]
    assert "SomethingOfTheBench" in failures[0][1]


def tiling(operator, **given):
    return ParameterSet(operator, "name", "910B", **given)


def half(*shape, **more):
    return Tensor(list(shape), "DT_FLOAT16", "FORMAT_ND", **more)


def test_a_tiling_becomes_a_call():
    of = tiling("SwiGlu", inputs=[half(4, 8)], outputs=[half(4, 4)], attributes={"dim": 1})
    assert operator_of("SwiGlu") == "aclnnSwiGlu"
    assert arguments_of(of) == [half(4, 8), 1, half(4, 4)]
    assert arguments_of(tiling("SwiGlu", inputs=[half(4, 8)], outputs=[half(4, 4)]))[1] == -1


def test_a_weight_that_a_tiling_transposes_is_seen_transposed():
    inputs = [half(3, 16), half(8, 16), half(8), None, None, None, None]
    of = tiling("WeightQuantBatchMatmulV2", inputs=inputs, attributes={"transpose_weight": True})
    weight = arguments_of(of)[1]
    assert (weight.shape, weight.strides) == ([16, 8], [1, 16])


def test_an_input_that_the_function_does_not_have():
    of = tiling("RotaryPositionEmbedding", inputs=[half(1), half(1), half(1), half(8, 8)], outputs=[half(1)])
    with pytest.raises(Unreadable, match="input 3"):
        arguments_of(of)


def test_packed_sequences_are_not_a_call_of_training_attention():
    inputs = [*[half(81, 2, 64)] * 3, *[None] * 5, Tensor([3], "DT_INT64", "FORMAT_ND")]
    of = tiling("FlashAttentionScore", inputs=inputs, outputs=[half(1)] * 4)
    with pytest.raises(Unreadable, match="input 8"):
        arguments_of(of)
    assert len(arguments_of(tiling("FlashAttentionScore", inputs=inputs[:8], outputs=[half(1)] * 4))) == 20


def test_a_tiling_is_no_call_where_the_function_casts_the_weight_first():
    inputs = [Tensor(shape, "DT_INT8", "FORMAT_ND") for shape in ([4, 8], [8, 2])] + [None] * 4
    of = ParameterSet("QuantBatchMatmulV3", "name", "310P", inputs=inputs, outputs=[half(4, 2)])
    with pytest.raises(Unreadable, match="casts to FRACTAL_NZ"):
        arguments_of(of)
    inputs[1] = Tensor([8, 2], "DT_INT8", "FORMAT_FRACTAL_NZ")
    assert arguments_of(of)[1] == inputs[1]
    inputs[1].format, of.soc = "FORMAT_ND", "910B"
    assert arguments_of(of)[1] == inputs[1]


def test_what_is_not_simulated_says_nothing_of_limits():
    assert verdict("sparseMode 9 (tree) is not simulated")[0] == "untranslatable"
    assert verdict("D is 24, it must be a multiple of 16")[0] == "refused"


def test_only_the_check_that_is_named_overrules():
    assert "CheckCaseSplitK" in overruling("aclnnGroupedMatmulV4", "groupType 2 needs x transposed").source
    assert overruling("aclnnGroupedMatmulV4", "x is Float") is None
    assert overruling("aclnnMm", "groupType 2 needs x transposed") is None
