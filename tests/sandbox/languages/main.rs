use std::io::{Read, Write};
fn deep(n: u64) -> u64 { let f = std::hint::black_box([n; 32]); if n == 0 { 0 } else { 1 + deep(n - 1) + 0 * f[0] } }
#[allow(unconditional_recursion)]
fn endless(n: u64) -> u64 { let f = std::hint::black_box([n; 32]); endless(n + 1) + f[0] }
fn opened(path: &str) -> bool {
    std::fs::read(path).map_or(false, |data| !data.is_empty())
        || std::fs::read_dir(path).map_or(false, |mut entries| entries.next().is_some())
}
fn main() {
    let mut data = Vec::new();
    std::io::stdin().read_to_end(&mut data).unwrap();
    let end = data.iter().position(|&b| b == b'\n').unwrap_or(data.len());
    let rest = &data[(end + 1).min(data.len())..];
    let text = String::from_utf8_lossy(rest).trim().to_string();
    match std::str::from_utf8(&data[..end]).unwrap() {
        "" => println!("empty"),
        "length" => println!("{}", rest.len()),
        "echo" => std::io::stdout().write_all(rest).unwrap(),
        "fail" => panic!("boom 42"),
        "bytes" => std::io::stdout().write_all(b"\xff\xfe").unwrap(),
        "threads" => {
            let threads: Vec<_> = (0..4).map(|_| std::thread::spawn(|| (0..100u64).sum::<u64>())).collect();
            println!("{}", threads.into_iter().map(|t| t.join().unwrap()).sum::<u64>());
        }
        "deep" => println!("{}", deep(text.parse().unwrap())),
        "endless" => println!("{}", endless(0)),
        "memory" => { let mut kept = Vec::new(); loop { kept.push(vec![1u8; 1 << 20]); } }
        "files" => println!("{}", text.split(' ').filter(|path| opened(path)).count()),
        _ => std::process::exit(9),
    }
}
