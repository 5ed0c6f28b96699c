package command

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"go.uber.org/goleak"

	"culvert.dev/connect/h3"
	"culvert.dev/internal/testnet"
)

// The scripts run this test binary, which is culvert where it is called so.
func TestMain(m *testing.M) {
	culvert := func() { os.Exit(Main(context.Background(), os.Args[1:], os.Stdout, os.Stderr)) }
	testscript.Main(leakChecked{m}, map[string]func(){"culvert": culvert, "kubectl-culvert": culvert})
}

// leakChecked is a testing.M that fails where goroutines are left.
type leakChecked struct{ m *testing.M }

func (l leakChecked) Run() int {
	testnet.Parallel(8)
	code := l.m.Run()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, "goroutines left after the tests:", err)
			code = 1
		}
	}
	return code
}

// Each file in testdata is a scenario. Besides the commands of testscript
// there are:
//
//	code N culvert ARGS...   run it and want exit code N
//	until culvert ARGS...    run it until it succeeds, for ten seconds at most
//	until-file NAME TEXT     wait until a file has TEXT in it
//	free NAME...             set each variable to a free address of loopback
//	listen NAME              listen at a free address for the rest of the script
//	echo NAME                send back what connections to a free address bring
//	echo-udp NAME            answer datagrams with themselves, at a free address
//	serve-quic NAME DIR NAME serve QUIC with DIR/NAME.crt, to those with a certificate of DIR/ca.crt
//	connect NAME ADDR TARGET open a tunnel by CONNECT for the rest of the script
//	[!] was-reset NAME       wait until a tunnel is reset; or it is open still
//	answers ADDR NAME WANT   wait until a DNS server by UDP has these addresses for a name, or
//	                         says "no such host", or "server misbehaving"
//	signal NAME              send TERM or HUP to what runs in the background
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata",
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Setup: func(env *testscript.Env) error {
			// A race detector waits a second at the end of each process.
			env.Setenv("GORACE", "atexit_sleep_ms=0")
			env.Values["tunnels"] = map[string]net.Conn{}
			return nil
		},
		Cmds: map[string]func(ts *testscript.TestScript, neg bool, args []string){
			"code":       cmdCode,
			"until":      cmdUntil,
			"until-file": cmdUntilFile,
			"free":       cmdFree,
			"listen":     cmdListen,
			"echo":       cmdEcho,
			"echo-udp":   cmdEchoUDP,
			"serve-quic": cmdServeQUIC,
			"connect":    cmdConnect,
			"was-reset":  cmdWasReset,
			"answers":    cmdAnswers,
			"signal":     cmdSignal,
		},
	})
}

func cmdCode(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: code N COMMAND...")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	got := 0
	var exit *exec.ExitError
	switch err := ts.Exec(args[1], args[2:]...); {
	case errors.As(err, &exit):
		got = exit.ExitCode()
	case err != nil:
		ts.Fatalf("%q: %v", args[1:], err)
	}
	if got != want {
		ts.Fatalf("%q: exit code %d, want %d", args[1:], got, want)
	}
}

// wait polls until done is true.
func wait(ts *testscript.TestScript, what string, done func() bool) {
	const most = time.Minute
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(most); !done(); <-tick.C {
		if time.Now().After(deadline) {
			ts.Fatalf("not within %v: %s", most, what)
		}
	}
}

func cmdUntil(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) == 0 {
		ts.Fatalf("usage: until COMMAND...")
	}
	wait(ts, fmt.Sprintf("%q", args), func() bool { return ts.Exec(args[0], args[1:]...) == nil })
}

func cmdUntilFile(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: until-file NAME TEXT")
	}
	wait(ts, fmt.Sprintf("%s has %q", args[0], args[1]), func() bool {
		data, _ := os.ReadFile(ts.MkAbs(args[0]))
		return bytes.Contains(data, []byte(args[1]))
	})
}

func cmdFree(ts *testscript.TestScript, neg bool, args []string) {
	if neg {
		ts.Fatalf("unsupported: ! free")
	}
	for _, name := range args {
		addr, release, err := testnet.ReservePort()
		ts.Check(err)
		ts.Defer(release)
		ts.Setenv(name, addr)
	}
}

func cmdListen(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: listen NAME")
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	ts.Check(err)
	ts.Defer(func() { _ = ln.Close() })
	ts.Setenv(args[0], ln.Addr().String())
}

func cmdEcho(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: echo NAME")
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	ts.Check(err)
	var all sync.WaitGroup
	ts.Defer(func() { _ = ln.Close(); all.Wait() })
	ts.Setenv(args[0], ln.Addr().String())
	all.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			all.Go(func() {
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(time.Minute))
				_, _ = io.Copy(c, c)
			})
		}
	})
}

func cmdEchoUDP(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: echo-udp NAME")
	}
	pc := freeUDP(ts, args[0])
	go func() {
		b := make([]byte, 1<<16)
		for {
			n, from, err := pc.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = pc.WriteTo(b[:n], from)
		}
	}()
}

func cmdServeQUIC(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 3 {
		ts.Fatalf("usage: serve-quic NAME DIR NAME")
	}
	file := func(name string) string { return ts.MkAbs(filepath.Join(args[1], name)) }
	pair, err := tls.LoadX509KeyPair(file(args[2]+".crt"), file(args[2]+".key"))
	ts.Check(err)
	roots, err := os.ReadFile(file("ca.crt"))
	ts.Check(err)
	cfg := &tls.Config{Certificates: []tls.Certificate{pair}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: x509.NewCertPool(), NextProtos: []string{"h3"}}
	cfg.ClientCAs.AppendCertsFromPEM(roots)
	pc := freeUDP(ts, args[0])
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = h3.ServeRawQUIC(ctx, pc, cfg, func(*tls.ConnectionState, []byte) []byte { return nil })
	}()
	ts.Defer(func() { cancel(); <-ended })
}

// freeUDP opens a socket for the rest of the script.
func freeUDP(ts *testscript.TestScript, name string) net.PacketConn {
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	ts.Check(err)
	ts.Defer(func() { _ = pc.Close() })
	ts.Setenv(name, pc.LocalAddr().String())
	return pc
}

func cmdConnect(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 3 {
		ts.Fatalf("usage: connect NAME ADDR TARGET")
	}
	c, err := net.DialTimeout("tcp", args[1], time.Minute)
	ts.Check(err)
	ts.Defer(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	_, err = fmt.Fprintf(c, "CONNECT %[1]s HTTP/1.1\r\nHost: %[1]s\r\n\r\n", args[2])
	ts.Check(err)
	answer := make([]byte, len("HTTP/1.1 200"))
	_, err = io.ReadFull(c, answer)
	ts.Check(err)
	if string(answer) != "HTTP/1.1 200" {
		ts.Fatalf("CONNECT %s: %q", args[2], answer)
	}
	ts.Value("tunnels").(map[string]net.Conn)[args[0]] = c
}

func cmdWasReset(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) != 1 {
		ts.Fatalf("usage: [!] was-reset NAME")
	}
	c := ts.Value("tunnels").(map[string]net.Conn)[args[0]]
	if c == nil {
		ts.Fatalf("no tunnel is called %q", args[0])
	}
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	if neg { // it is open if it takes a byte and has nothing to say
		_ = c.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
		_, err := c.Write([]byte{0})
		ts.Check(err)
	}
	_, err := io.Copy(io.Discard, c) // the rest of the answer comes first
	if want := map[bool]error{false: syscall.ECONNRESET, true: os.ErrDeadlineExceeded}[neg]; !errors.Is(err, want) {
		ts.Fatalf("tunnel %s: %v, want %v", args[0], err, want)
	}
}

func cmdAnswers(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 3 {
		ts.Fatalf("usage: answers ADDR NAME WANT")
	}
	resolver := &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "udp", args[0])
	}}
	got := ""
	ts.Defer(func() { ts.Logf("the last answer for %s: %s", args[1], got) })
	wait(ts, fmt.Sprintf("%s has %s", args[1], args[2]), func() bool {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		addrs, err := resolver.LookupHost(ctx, args[1])
		slices.Sort(addrs)
		got = strings.Join(addrs, " ")
		var de *net.DNSError
		if errors.As(err, &de) {
			got = de.Err
		}
		return got == args[2]
	})
}

func cmdSignal(ts *testscript.TestScript, neg bool, args []string) {
	signals := map[string]os.Signal{"TERM": syscall.SIGTERM, "HUP": hangup}
	if neg || len(args) != 1 || signals[args[0]] == nil {
		ts.Fatalf("usage: signal TERM|HUP")
	}
	for _, c := range ts.BackgroundCmds() {
		ts.Check(c.Process.Signal(signals[args[0]]))
	}
}
