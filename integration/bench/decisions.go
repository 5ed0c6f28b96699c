//go:build linux

package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// A decision is what one of Go's benchmarks says.
type decision struct {
	name, title string
	limit       float64 // target, in ns; 0 for none
	free        bool    // and it must not allocate

	ns, allocations float64
}

// decisions lists them, by the names of the benchmarks.
func decisions() []decision {
	return []decision{
		{name: "BenchmarkDecide/10", title: "a decision, 10 rules", limit: 300, free: true},
		{name: "BenchmarkDecide/10000", title: "a decision, 10,000 rules", limit: 600, free: true},
		{name: "BenchmarkVerify/direct", title: "a client certificate, its chain verified", limit: 150_000},
		{name: "BenchmarkVerify/direct_by_crypto/x509_alone", title: "the same by crypto/x509 alone"},
		{name: "BenchmarkES256", title: "a JSON Web Token, ES256", limit: 120_000},
		{name: "BenchmarkRepeated", title: "the same token again", limit: 1000},
	}
}

// benchmarkDecisions runs the benchmarks of the module that this one is beside.
func benchmarkDecisions(ctx context.Context) ([]decision, error) {
	root, err := exec.CommandContext(ctx, "go", "list", "-f", "{{.Dir}}", "-m", "culvert.dev").Output()
	if err != nil {
		return nil, fmt.Errorf("where culvert.dev is: %w", err)
	}
	cmd := exec.CommandContext(ctx, "go", "test", "-run", "^$", "-bench", "^Benchmark(Decide|Verify|ES256|Repeated)$", "-benchmem", "./policy", "./identity", "./identity/jwt")
	cmd.Dir = filepath.Clean(string(bytes.TrimSpace(root)))
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w\n%s", cmd, err, out)
	}
	return readBenchmarks(out)
}

// readBenchmarks finds the decisions in what "go test -bench" has written.
func readBenchmarks(out []byte) ([]decision, error) {
	all := decisions()
	for in := bufio.NewScanner(bytes.NewReader(out)); in.Scan(); {
		fields := strings.Fields(in.Text())
		if len(fields) < 8 || fields[3] != "ns/op" {
			continue
		}
		name := fields[0][:max(0, strings.LastIndexByte(fields[0], '-'))] // without GOMAXPROCS
		if name == "" {
			name = fields[0]
		}
		i := slices.IndexFunc(all, func(d decision) bool { return d.name == name })
		if i < 0 {
			continue
		}
		var errs [2]error
		all[i].ns, errs[0] = strconv.ParseFloat(fields[2], 64)
		all[i].allocations, errs[1] = strconv.ParseFloat(fields[6], 64)
		if err := errors.Join(errs[:]...); err != nil {
			return nil, fmt.Errorf("benchmark %q: %w", in.Text(), err)
		}
	}
	for _, d := range all {
		if d.ns == 0 {
			return nil, fmt.Errorf("no benchmark is called %s:\n%s", d.name, out)
		}
	}
	return all, nil
}
