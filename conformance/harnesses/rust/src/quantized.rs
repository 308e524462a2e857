//! The quantized cache: a fixed number of tokens per layer; each head's row is quantized separately, once, when it is appended.

use crate::formats::Format;
use kvref_sdk::{refuse, Result};

pub struct Config {
    pub num_layers: usize,
    pub capacity: usize, // tokens per layer
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub format: Format,
}

/// Keys or values of one layer: the bytes of codes and scales of each row, [capacity, num_kv_heads].
struct Store {
    codes: Vec<u8>,
    scales: Vec<u8>,
}

struct Layer {
    keys: Store,
    values: Store,
    length: usize,
}

pub struct QuantizedCache {
    pub config: Config,
    layers: Vec<Layer>,
    shares_scales: bool,
}

impl QuantizedCache {
    /// shares_scales: the bug. All heads of a token use the scale of the first head, in formats with separate scales.
    pub fn new(config: Config, shares_scales: bool) -> QuantizedCache {
        let rows = config.capacity * config.num_kv_heads;
        let (codes, scales) = config.format.bytes(config.head_dim);
        let store = || Store { codes: vec![0; rows * codes], scales: vec![0; rows * scales] };
        let layers = (0..config.num_layers).map(|_| Layer { keys: store(), values: store(), length: 0 }).collect();
        QuantizedCache { config, layers, shares_scales }
    }

    pub fn length(&self, layer: usize) -> usize {
        self.layers[layer].length
    }

    pub fn clear(&mut self) {
        self.truncate(0);
    }

    /// Keeps the first `length` tokens of each layer. All layers have at least that many.
    pub fn truncate(&mut self, length: usize) {
        self.layers.iter_mut().for_each(|layer| layer.length = length);
    }

    /// The smallest number of tokens of any layer.
    pub fn shortest(&self) -> usize {
        self.layers.iter().map(|layer| layer.length).min().unwrap_or(0)
    }

    /// Appends token i to layers[i], keys and values [layers, num_kv_heads, head_dim]: all of them or none.
    pub fn append(&mut self, layers: &[usize], keys: &[f32], values: &[f32]) -> Result<()> {
        let Config { capacity, num_kv_heads, head_dim, format, .. } = self.config;
        format.must_read_back("keys", keys, head_dim)?;
        format.must_read_back("values", values, head_dim)?;
        for (number, layer) in self.layers.iter().enumerate() {
            let needed = layer.length + layers.iter().filter(|each| **each == number).count();
            if needed > capacity {
                return refuse(
                    "CapacityExceeded",
                    format!("append: expected at most {capacity} tokens in layer {number}, got {needed}"),
                );
            }
        }
        let token = num_kv_heads * head_dim;
        let (code_bytes, scale_bytes) = format.bytes(head_dim);
        for (i, number) in layers.iter().enumerate() {
            let layer = &mut self.layers[*number];
            for (store, rows) in [(&mut layer.keys, &keys[i * token..]), (&mut layer.values, &values[i * token..])] {
                for (head, row) in rows[..token].chunks_exact(head_dim).enumerate() {
                    let at = layer.length * num_kv_heads + head;
                    let codes = &mut store.codes[at * code_bytes..][..code_bytes];
                    match format {
                        Format::Symmetric(symmetric) if self.shares_scales => {
                            let scale = symmetric.scale(&rows[..head_dim]);
                            symmetric.quantize(row, scale, codes);
                            store.scales[at * 4..][..4].copy_from_slice(&scale.to_le_bytes());
                        }
                        _ => format.store(row, codes, &mut store.scales[at * scale_bytes..][..scale_bytes]),
                    }
                }
            }
            layer.length += 1;
        }
        Ok(())
    }

    /// Returns keys and values at these positions, [positions, num_kv_heads, head_dim].
    pub fn read(&self, layer: usize, positions: &[usize]) -> (Vec<f32>, Vec<f32>) {
        let Config { num_kv_heads, head_dim, format, .. } = self.config;
        let (codes, scales) = format.bytes(head_dim);
        let from = |store: &Store| {
            let mut numbers = vec![0f32; positions.len() * num_kv_heads * head_dim];
            for (i, row) in numbers.chunks_exact_mut(head_dim).enumerate() {
                let at = positions[i / num_kv_heads] * num_kv_heads + i % num_kv_heads;
                format.read(&store.codes[at * codes..][..codes], &store.scales[at * scales..][..scales], row);
            }
            numbers
        };
        (from(&self.layers[layer].keys), from(&self.layers[layer].values))
    }

    /// The bytes of codes and scales for the whole capacity.
    pub fn memory_bytes(&self) -> usize {
        let rows = 2 * self.config.num_layers * self.config.capacity * self.config.num_kv_heads;
        let (codes, scales) = self.config.format.bytes(self.config.head_dim);
        rows * (codes + scales)
    }

    pub fn fp32_bytes(&self) -> usize {
        8 * self.config.num_layers * self.config.capacity * self.config.num_kv_heads * self.config.head_dim
    }

    /// softmax(scale q k') v over a layer; query and result are [num_queries, num_query_heads, head_dim].
    pub fn attend(&self, layer: usize, query: &[f32], num_heads: usize, scale: f64) -> Result<Vec<f32>> {
        let Config { num_kv_heads, head_dim, .. } = self.config;
        if num_heads % num_kv_heads != 0 {
            return refuse("ShapeMismatch", format!("query: expected a multiple of {num_kv_heads} heads, got {num_heads}"));
        }
        let tokens: Vec<usize> = (0..self.length(layer)).collect();
        let (keys, values) = self.read(layer, &tokens);
        let mut out = vec![0f32; query.len()];
        for (i, (q, mean)) in query.chunks_exact(head_dim).zip(out.chunks_exact_mut(head_dim)).enumerate() {
            let head = i % num_heads / (num_heads / num_kv_heads);
            let row = |token: usize| (token * num_kv_heads + head) * head_dim..(token * num_kv_heads + head + 1) * head_dim;
            let dot = |key: &[f32]| q.iter().zip(key).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
            let scores: Vec<f64> = tokens.iter().map(|token| scale * dot(&keys[row(*token)])).collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect(); // at most 1, so the sum cannot overflow
            let sum: f64 = weights.iter().sum();
            for (d, x) in mean.iter_mut().enumerate() {
                *x = tokens.iter().map(|token| weights[*token] / sum * f64::from(values[row(*token)][d])).sum::<f64>() as f32;
            }
        }
        Ok(out)
    }
}
