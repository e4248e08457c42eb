package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
)

func deep(n int) int {
	if n == 0 {
		return 0
	}
	return 1 + deep(n-1)
}
func endless(n int) int { return 1 + endless(n+1) }
func opened(path string) bool {
	entries, _ := os.ReadDir(path)
	data, _ := os.ReadFile(path)
	return len(entries)+len(data) > 0
}
func main() {
	data, _ := io.ReadAll(os.Stdin)
	command, rest, _ := bytes.Cut(data, []byte("\n"))
	switch string(command) {
	case "":
		fmt.Println("empty")
	case "length":
		fmt.Println(len(rest))
	case "echo":
		os.Stdout.Write(rest)
	case "fail":
		panic("boom 42")
	case "bytes":
		os.Stdout.Write([]byte{255, 254})
	case "threads":
		sums := make(chan int)
		for i := 0; i < 4; i++ {
			go func() {
				s := 0
				for j := 0; j < 100; j++ {
					s += j
				}
				sums <- s
			}()
		}
		fmt.Println(<-sums + <-sums + <-sums + <-sums)
	case "deep":
		n, _ := strconv.Atoi(strings.TrimSpace(string(rest)))
		fmt.Println(deep(n))
	case "endless":
		fmt.Println(endless(0))
	case "memory":
		var kept [][]byte
		for {
			block := make([]byte, 1<<20)
			for i := range block {
				block[i] = 1
			}
			kept = append(kept, block)
		}
	case "files":
		count := 0
		for _, path := range strings.Fields(string(rest)) {
			if opened(path) {
				count++
			}
		}
		fmt.Println(count)
	}
}
