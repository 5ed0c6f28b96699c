package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"culvert.dev/dns"
	"culvert.dev/internal/capture"
	"culvert.dev/internal/isolate"
	"culvert.dev/tunnel"
)

// enterCommand is what "exec" starts in the namespaces that it makes.
const enterCommand = "exec-in-namespace"

type execOptions struct {
	agent  string
	shown  agentCredentials // to the agent
	strict bool
	args   []string
}

func newExec() *cobra.Command {
	var o execOptions
	cmd := &cobra.Command{
		Use:   "exec [flags] -- COMMAND [ARGUMENT...]",
		Short: "Run a program whose every connection goes through the agent",
		Long: `Exec runs a program that knows nothing of the agent, and needs no rights. The
program gets a network of its own, in which every TCP connection goes to the
agent at --agent, with the name that the program has looked up; the agent
decides. The network of the machine stays as it is for all other programs.

The program reaches nothing else: not the network, not services at localhost, and
no UDP but DNS, which exec answers itself. It has the terminal, the files and the
user of the one who runs it, and setuid programs keep that user. Signals are
passed on, and the exit code is the program's; 125 says that exec failed, 126
that the program could not be run, 127 that it was not found.

It needs Linux with user namespaces. Where they are off, exec says so and
gives the program HTTPS_PROXY and ALL_PROXY, which not every program heeds; with
--strict it fails.

An agent that has auth is shown a user and a password, or a token: each is read from
a file. The program gets none of them, so exec fails where user namespaces are off.`,
		Example: `  culvert exec -- curl https://orders.shop.example
  culvert exec -- psql 'host=db.shop.example sslmode=verify-full'
  culvert exec --agent 127.0.0.1:1081 -- bash`,
		Args: func(_ *cobra.Command, a []string) error {
			if len(a) == 0 {
				return usageError("write culvert exec -- COMMAND", "culvert exec needs a command to run")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, a []string) error {
			o.args = a
			if err := o.shown.check(o.agent); err != nil {
				return err
			}
			code, err := runExec(cmd.Context(), cmd.ErrOrStderr(), &o)
			if code == exitOK && err == nil {
				return nil
			}
			var ce *cliError
			if errors.As(err, &ce) { // which has a hint
				return err
			}
			if err == nil {
				err = errSilent
			}
			return &cliError{err: err, code: code}
		},
	}
	f := cmd.Flags()
	f.SetInterspersed(false)
	f.StringVar(&o.agent, "agent", defaultAgent, "where the agent is asked by CONNECT: HOST:PORT or unix:PATH")
	o.shown.add(cmd)
	f.BoolVar(&o.strict, "strict", false, "fail where the program cannot have a network of its own")
	_ = cmd.RegisterFlagCompletionFunc("agent", cobra.NoFileCompletions)
	return cmd
}

func newEnter() *cobra.Command {
	return &cobra.Command{
		Use: enterCommand, Hidden: true, DisableFlagParsing: true,
		RunE: func(cmd *cobra.Command, a []string) error {
			code, err := isolate.Enter(cmd.Context(), a)
			return &cliError{err: fmt.Errorf("exec: %w", err), code: code}
		},
	}
}

// runExec runs the program and returns its exit code, or an error of exec itself.
func runExec(ctx context.Context, stderr io.Writer, o *execOptions) (code int, err error) {
	agent := &agentDialer{address: o.agent, credentials: o.shown}
	if err := agent.find(ctx); err != nil {
		return isolate.NotSetUp, err
	}
	self, err := os.Executable()
	if err != nil {
		return isolate.NotSetUp, err
	}
	program := exec.Command(self, append([]string{enterCommand}, o.args...)...)
	program.Stdin, program.Stdout, program.Stderr = os.Stdin, os.Stdout, os.Stderr
	// Before the program is there: it gets them all.
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, passedOn...)
	defer signal.Stop(signals)
	sockets, err := isolate.Start(program)
	var unavailable *isolate.Unavailable
	switch {
	case errors.As(err, &unavailable) && !o.strict && o.shown.none() && !strings.HasPrefix(o.agent, "unix:"):
		fmt.Fprintf(stderr, "culvert: the program has no network of its own: %v\n", err)
		fmt.Fprintf(stderr, "culvert: it gets HTTPS_PROXY and ALL_PROXY; what it does not send there goes past the agent\n")
		program = exec.Command(o.args[0], o.args[1:]...)
		program.Stdin, program.Stdout, program.Stderr = os.Stdin, os.Stdout, os.Stderr
		program.Env = append(os.Environ(), "HTTPS_PROXY=http://"+o.agent, "https_proxy=http://"+o.agent, "ALL_PROXY=socks5h://"+o.agent, "all_proxy=socks5h://"+o.agent)
		if err := program.Start(); err != nil {
			code := isolate.CannotRun
			if errors.Is(err, exec.ErrNotFound) {
				code = isolate.NotFound
			}
			return code, err
		}
	case err != nil:
		return isolate.NotSetUp, &cliError{err: fmt.Errorf("exec: %w", err), hint: "without --strict the program gets HTTPS_PROXY and ALL_PROXY where the agent is at HOST:PORT and asks for no credentials", code: isolate.NotSetUp}
	default:
		defer serveIsolated(ctx, stderr, agent, sockets)()
	}
	ended := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case s := <-signals:
				passOn(program.Process, s)
			case <-ended:
				return
			}
		}
	})
	err = program.Wait()
	close(ended)
	wg.Wait()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return isolate.NotSetUp, err
	}
	return exitCode(program.ProcessState), nil
}

// serveIsolated serves the sockets of a program until the function that it returns is called.
func serveIsolated(ctx context.Context, stderr io.Writer, agent *agentDialer, sockets *isolate.Sockets) (stop func()) {
	names := new(capture.Names)
	var mu sync.Mutex // held over each line
	say := func(o *tunnel.Outcome) {
		if o.Err == nil || o.Reason == tunnel.Done || o.Reason == tunnel.Reset || o.Reason == tunnel.Drain {
			return
		}
		mu.Lock()
		defer mu.Unlock()
		out := newCleanWriter(stderr)
		fmt.Fprintf(out, "culvert: %s refused (%s): %v\n", o.Target, o.Reason, o.Err)
		_ = out.Close()
	}
	loops, relay := &tunnel.Loops{}, &tunnel.Relay{}
	relay.Loops = loops
	router := &tunnel.Router{Resolver: agent, Relay: relay, Observe: say}
	server := &tunnel.Server{Handler: router, Loops: loops, Observe: say}
	answers := isolatedNames{names: names, ipv6: sockets.IPv6}
	resolver := &dns.Server{Zones: []string{""}, Names: func() dns.Names { return answers }, RateLimit: -1}
	ctx = context.WithoutCancel(ctx)
	var wg sync.WaitGroup
	for _, ln := range sockets.Captured {
		wg.Go(func() {
			_ = server.Serve(ctx, tunnel.Listener{Listener: ln, Name: "captured", Protocols: []tunnel.Protocol{&capture.Protocol{Resolve: names.Resolve}}})
		})
	}
	for _, c := range sockets.DNS {
		wg.Go(func() { _ = resolver.ServeUDP(ctx, c, "") })
	}
	for _, ln := range sockets.DNSOverTCP {
		wg.Go(func() { _ = resolver.ServeTCP(ctx, ln, "") })
	}
	return func() {
		// What the program has left behind goes on in the background no longer. What was refused
		// is said before.
		now, cancel := context.WithCancel(ctx)
		cancel()
		_ = server.Shutdown(now)
		_ = resolver.Close()
		_ = relay.Close()
		sockets.Close()
		wg.Wait()
		_ = loops.Close()
	}
}

// isolatedNames answers every name with addresses that are captured.
type isolatedNames struct {
	names *capture.Names
	ipv6  bool
}

// Answer implements dns.Names.
func (n isolatedNames) Answer(q dns.Question, a *dns.Answer) {
	name, err := tunnel.ParseName(q.Name)
	if err != nil || strings.HasSuffix(q.Name, ".arpa") || !strings.Contains(q.Name, ".") {
		return
	}
	a.Status = dns.Exists
	if q.Type != dns.TypeA && q.Type != dns.TypeAAAA {
		return
	}
	v4, v6 := n.names.Addrs(name)
	a.Addrs = []dns.Addr{{Addr: v4}}
	if n.ipv6 {
		a.Addrs = append(a.Addrs, dns.Addr{Addr: v6})
	}
}

// Updated implements dns.Names.
func (isolatedNames) Updated() time.Time { return time.Now() }
