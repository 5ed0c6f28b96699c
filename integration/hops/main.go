// Command hops counts what one TLS connection passes in the gateway, from accept to the
// Relay: the functions and the files of this module that are entered, as the Go
// compiler's coverage counts them. "make hops" builds it with coverage and runs it:
//
//	go build -cover -covermode=atomic -coverpkg=culvert.dev/... -o ../bin/hops ./hops
//
// A gateway with one listener for SNI and one service runs in the process. After some
// connections that are not counted, all counters are cleared, one client sends a
// ClientHello, and once the service has it and the Relay carries the tunnel, the
// counters are written. This is done several times. What is counted is what was entered
// each time: the rest is what the gateway does from time to time.
//
// A function literal counts as part of the function that it is in. Functions of one
// statement, such as getters, are counted by themselves, too: a reader rarely has to
// open them. What the connection does after that, until its end, is not counted.
package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"log"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/coverage"
	"slices"
	"strconv"
	"strings"
	"time"

	"culvert.dev/internal/gateway"
	"culvert.dev/registry"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
)

const (
	name    = "svc.example.com"
	warmUps = 5
	rounds  = 10

	// settle is how long the gateway has to do what it does beside a connection.
	settle = 50 * time.Millisecond
)

func main() {
	list := flag.Bool("list", false, "print each function, and how many statements it has")
	source := flag.String("source", ".", "the `folder` of the module culvert.dev")
	flag.Parse()
	functions, err := count()
	if err != nil {
		log.Fatal(err)
	}
	files, longFiles, long := map[string]int{}, map[string]bool{}, 0
	for _, f := range functions {
		n, err := f.statements(*source)
		if err != nil {
			log.Fatal(err)
		}
		files[f.file]++
		if n > 1 {
			long++
			longFiles[f.file] = true
		}
		if *list {
			fmt.Printf("%s:%d\t%s\t%d\n", f.file, f.line, f.name, n)
		}
	}
	for _, file := range slices.Sorted(maps.Keys(files)) {
		fmt.Printf("%4d %s\n", files[file], file)
	}
	fmt.Printf("%d functions in %d files; %d of more than one statement, in %d\n", len(functions), len(files), long, len(longFiles))
}

// A function is one of the gateway's.
type function struct {
	file string // below the module's folder
	line int
	name string
}

// statements returns how many statements the function has.
func (f function) statements(source string) (n int, err error) {
	set := token.NewFileSet()
	file, err := parser.ParseFile(set, filepath.Join(source, f.file), nil, 0)
	if err != nil {
		return 0, err
	}
	for _, d := range file.Decls {
		if fn, ok := d.(*ast.FuncDecl); ok && set.Position(fn.Pos()).Line == f.line {
			ast.Inspect(fn.Body, func(node ast.Node) bool {
				if _, block := node.(*ast.BlockStmt); block {
					return true
				}
				if _, ok := node.(ast.Stmt); ok {
					n++
				}
				return true
			})
			return n, nil
		}
	}
	return 0, fmt.Errorf("no function begins at %s:%d", f.file, f.line)
}

// count returns the functions that each connection enters.
func count() ([]function, error) {
	service, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	defer service.Close()
	addr, stop, err := serve(service.Addr().String())
	if err != nil {
		return nil, err
	}
	defer stop()
	hello, err := clientHello()
	if err != nil {
		return nil, err
	}
	for range warmUps {
		if _, err := entered(addr, service, hello); err != nil {
			return nil, err
		}
	}
	every, err := entered(addr, service, hello)
	if err != nil {
		return nil, err
	}
	for range rounds - 1 {
		again, err := entered(addr, service, hello)
		if err != nil {
			return nil, err
		}
		every = slices.DeleteFunc(every, func(f function) bool { return !slices.Contains(again, f) })
	}
	return every, nil
}

// serve starts the gateway, with one service at the given address, and returns its own.
func serve(address string) (gatewayAddr string, stop func(), err error) {
	at := netip.MustParseAddrPort(address)
	ctx, cancel := context.WithCancel(context.Background())
	ready := make(chan struct{})
	g, err := gateway.New(ctx, gateway.Config{
		Listeners: []gateway.Listener{{Address: "127.0.0.1:0", Protocols: []tunnel.Protocol{&sni.Protocol{}}}},
		Sources: []registry.Source{registry.Static{Name: "hops", Snapshot: registry.Snapshot{Services: []*registry.Service{{
			Name: "svc", Names: []tunnel.Pattern{{Suffix: tunnel.MustParseName(name)}}, Exposed: true,
			Endpoints: []registry.Endpoint{{Addr: at.Addr(), Port: at.Port()}},
		}}}}},
		Serving:      func() { close(ready) },
		DrainTimeout: -1,
	})
	if err != nil {
		cancel()
		return "", nil, err
	}
	done := make(chan error, 1)
	go func() { done <- g.Run(ctx, nil) }()
	select {
	case <-ready:
	case err := <-done:
		cancel()
		return "", nil, err
	}
	return g.Addrs()[0].String(), func() { cancel(); <-done }, nil
}

// clientHello returns the first bytes of a TLS client.
func clientHello() ([]byte, error) {
	client, server := net.Pipe()
	defer client.Close()
	defer server.Close()
	go func() {
		_ = tls.Client(client, &tls.Config{ServerName: name, NextProtos: []string{"h2", "http/1.1"}}).Handshake()
	}()
	header := make([]byte, 5)
	if _, err := io.ReadFull(server, header); err != nil {
		return nil, err
	}
	body := make([]byte, int(header[3])<<8|int(header[4]))
	_, err := io.ReadFull(server, body)
	return append(header, body...), err
}

// entered has the gateway carry one connection, and returns the functions that it
// entered for it.
func entered(gatewayAddr string, service net.Listener, hello []byte) ([]function, error) {
	dir, err := os.MkdirTemp("", "hops")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	time.Sleep(settle)
	if err := coverage.ClearCounters(); err != nil {
		return nil, fmt.Errorf("hops must be built with -cover -covermode=atomic, as by make hops: %w", err)
	}
	client, err := net.Dial("tcp", gatewayAddr)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	if _, err := client.Write(hello); err != nil {
		return nil, err
	}
	server, err := service.Accept()
	if err != nil {
		return nil, err
	}
	defer server.Close()
	got := make([]byte, len(hello))
	if _, err := io.ReadFull(server, got); err != nil || !bytes.Equal(got, hello) {
		return nil, fmt.Errorf("the service did not get the ClientHello: %w", errors.Join(err, io.ErrUnexpectedEOF))
	}
	time.Sleep(settle)
	if err := errors.Join(coverage.WriteMetaDir(dir), coverage.WriteCountersDir(dir)); err != nil {
		return nil, err
	}
	out, err := exec.Command("go", "tool", "covdata", "func", "-i="+dir).Output()
	if err != nil {
		return nil, fmt.Errorf("go tool covdata: %w", err)
	}
	return parse(out), nil
}

// parse reads what "go tool covdata func" prints: file:line:, function, percentage.
func parse(out []byte) (functions []function) {
	for lines := bufio.NewScanner(bytes.NewReader(out)); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if len(fields) != 3 || fields[2] == "0.0%" || fields[0] == "total" {
			continue
		}
		file, rest, _ := strings.Cut(strings.TrimPrefix(fields[0], "culvert.dev/"), ":")
		line, err := strconv.Atoi(strings.TrimSuffix(rest, ":"))
		if err == nil && filepath.Dir(file) != "integration/hops" {
			functions = append(functions, function{file, line, fields[1]})
		}
	}
	return functions
}
