// transformers.js' Tensor, on a Node without Float16Array: a cast to float16, and `cat` of tensors of different widths
const { Tensor, cat } = require("@huggingface/transformers");

const half = new Tensor("float32", [1, 1.5, 0.25, -2], [4]).to("float16");
console.log(typeof Float16Array, half.data, half.to("float32").data);

const tokens = (dims, ...numbers) => new Tensor("float32", Float32Array.from(numbers), dims);
const joined = cat([tokens([1, 1, 2, 2], 1, 2, 3, 4), tokens([1, 1, 1, 3], 5, 6, 7)], 2);
console.log(joined.dims, joined.data); // the 7 is lost
const short = cat([tokens([1, 2, 1, 2], 1, 2, 3, 4), tokens([1, 1, 1, 2], 5, 6)], 2);
console.log(short.dims, short.data); // the new token of the second head is zeros
