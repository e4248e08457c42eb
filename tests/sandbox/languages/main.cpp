#include <bits/stdc++.h>
using namespace std;
static long deep(long n) { volatile char frame[256]; frame[0] = n; return n ? 1 + deep(n - 1) + 0 * frame[0] : 0; }
static long endless(volatile long n) { volatile char frame[256]; frame[0] = n; return n + endless(n + 1) + frame[0]; }
int main() {
  string data(istreambuf_iterator<char>(cin), {});
  auto end = data.find('\n');
  string command = data.substr(0, end), rest = end == string::npos ? "" : data.substr(end + 1);
  if (command == "") cout << "empty\n";
  if (command == "length") cout << rest.size() << endl;
  if (command == "echo") cout << rest;
  if (command == "fail") throw runtime_error("boom 42");
  if (command == "bytes") cout << "\xff\xfe";
  if (command == "threads") {
    vector<thread> threads;
    atomic<long> all = 0;
    for (int i = 0; i < 4; i++) threads.emplace_back([&] { for (int j = 0; j < 100; j++) all += j; });
    for (auto &each : threads) each.join();
    cout << all << endl;
  }
  if (command == "deep") cout << deep(stol(rest)) << endl;
  if (command == "endless") cout << endless(0) << endl;
  if (command == "memory") { vector<string> kept; while (true) kept.emplace_back(1 << 20, 'x'); }
  if (command == "files") {
    istringstream paths(rest);
    int opened = 0;
    error_code error;
    for (string path; paths >> path;)
      opened += ifstream(path).get() != EOF || filesystem::directory_iterator(path, error) != filesystem::directory_iterator();
    cout << opened << endl;
  }
}
