package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"culvert.dev/connect"
	"culvert.dev/internal/gateway"
	"culvert.dev/tunnel"
)

type connectOptions struct {
	sourceOptions
	gateways agentFlags
	address  string           // of the agent
	shown    agentCredentials // to the agent
	direct   bool             // a flag says which gateways are asked
	fdpass   bool
	timeout  time.Duration
	target   string // HOST:PORT
}

func newConnect() *cobra.Command {
	var o connectOptions
	cmd := &cobra.Command{
		Use:   "connect HOST PORT",
		Short: "Connect standard input and output to a service, as ProxyCommand of ssh",
		Long: `Connect asks the agent of this machine for a service, and carries standard input to
it and what it answers to standard output. Each direction ends by itself. It is a
ProxyCommand for ssh and for all that uses ssh: git, scp, rsync, Ansible.

With --fdpass it hands the connection to the agent over to ssh, which has
ProxyUseFdpass=yes, and ends: no process stays beside ssh, and ssh reads and
writes the connection itself. The option is never guessed, because other programs
give their ProxyCommand a socket, too, and want the bytes.

An agent that has auth is shown a user and a password, or a token: each is read from
a file.

With the flags of culvert agent for gateways, or --state, no agent is needed:
connect asks a gateway itself. The connection is within TLS then, so it cannot be
handed over, and --fdpass is refused.

A refusal is written to standard error with its reason, nothing to standard
output, and the exit code is 1.`,
		Example: `  ssh -o 'ProxyCommand=culvert connect %h %p' build.shop.example
  ssh -o 'ProxyCommand=culvert connect --fdpass %h %p' -o ProxyUseFdpass=yes build.shop.example
  GIT_SSH_COMMAND='ssh -o "ProxyCommand=culvert connect %h %p"' git clone git@git.shop.example:site.git
  culvert connect --agent unix:/run/user/1000/culvert.sock build.shop.example 22
  culvert connect --gateway gw.example --cert me.pem --key me.key --ca ca.pem build.shop.example 22`,
		Args:              args(2, "HOST and PORT"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, a []string) error {
			o.target = net.JoinHostPort(a[0], a[1])
			for _, name := range append([]string{"config"}, gatewayFlags...) {
				o.direct = o.direct || cmd.Flags().Changed(name)
			}
			if o.direct && cmd.Flags().Changed("agent") {
				return usageError("leave --agent out to ask a gateway, or keep it alone", "--agent does not go with flags that say which gateways are asked")
			}
			if o.direct && !o.shown.none() {
				return usageError("leave --"+strings.Join(agentCredentialFlags, ", --")+" out to ask a gateway", "credentials for an agent do not go with flags that say which gateways are asked")
			}
			if err := o.shown.check(o.address); err != nil {
				return err
			}
			return runConnect(cmd.Context(), os.Stdin, os.Stdout, &o)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.address, "agent", defaultAgent, "where the agent is asked by CONNECT: HOST:PORT or unix:PATH")
	o.shown.add(cmd)
	f.BoolVar(&o.fdpass, "fdpass", false, "hand the connection over by standard output, for ProxyUseFdpass=yes of ssh, and end")
	f.DurationVar(&o.timeout, "timeout", 30*time.Second, "time limit until the service is reached")
	f.StringVar(&o.config, "config", "", "configuration file with the part agent, YAML, in place of the flags for gateways")
	o.gateways.addGateway(cmd)
	_ = cmd.RegisterFlagCompletionFunc("agent", cobra.NoFileCompletions)
	return cmd
}

// runConnect connects in and out to a service until both directions have ended.
func runConnect(ctx context.Context, in, out *os.File, o *connectOptions) error {
	if _, err := connect.ParseAuthority(o.target); err != nil {
		return usageError("write the name of a service, and its port", "HOST PORT: %w", err)
	}
	if o.fdpass {
		if o.direct {
			return usageError("leave --fdpass and ProxyUseFdpass out, or start culvert agent", "--fdpass hands over the connection to an agent, and without one the connection is within TLS of this process")
		}
		if err := canPass(out); err != nil {
			return usageError("leave it out, or use it as ProxyCommand of ssh with -o ProxyUseFdpass=yes", "--fdpass: %w", err)
		}
	}
	if o.direct {
		return o.askGateways(ctx, in, out)
	}
	dialing, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	c, err := (&agentDialer{address: o.address, credentials: o.shown}).exactly(dialing, o.target, o.timeout)
	if err != nil {
		return connectError(err, `start "culvert agent", or say where it is with --agent`)
	}
	defer c.Close()
	if o.fdpass {
		if err := passSocket(out, c); err != nil {
			return fmt.Errorf("hand the connection over to ssh: %w", err)
		}
		return nil
	}
	return carry(in, out, c)
}

// askGateways is runConnect without an agent: with one in this process, which has no listeners.
// A signal, by which ssh ends it, has the connection end in order.
func (o *connectOptions) askGateways(ctx context.Context, in, out *os.File) error {
	ctx, cancel := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM, hangup)
	defer cancel()
	dialing, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	o.agent = &o.gateways
	c, err := o.load()
	if err != nil {
		return err
	}
	// Of a file, what makes connections. The rest is for the agent that serves by it.
	c.Listeners, c.ServicePorts, c.DNS, c.Reverse, c.Kubernetes, c.VIPs, c.Admin = nil, nil, nil, nil, nil, nil, ""
	serving := make(chan struct{})
	g, ids, err := inProcess(ctx, c, slog.New(slog.DiscardHandler), func(cfg *gateway.Config) {
		cfg.DialOnly, cfg.Loops, cfg.Serving = true, 1, func() { close(serving) }
	})
	if err != nil {
		return err
	}
	defer ids.close()
	running, stop := context.WithCancelCause(ctx)
	ran := make(chan error, 1)
	go func() { ran <- g.Run(running, nil) }()
	defer func() { stop(gateway.ErrInterrupted); <-ran }()
	select {
	case <-serving:
	case err := <-ran:
		ran <- nil
		return err
	}
	stream, err := g.Dial(dialing, o.target)
	if err != nil {
		return connectError(err, "see what is wrong on the way: culvert doctor")
	}
	defer context.AfterFunc(ctx, func() { _ = stream.Close() })()
	defer stream.Close()
	if err := carry(in, out, stream); ctx.Err() == nil {
		return err
	}
	return nil
}

// connectError has the hint where the service was not refused, but nobody was there to ask.
func connectError(err error, hint string) error {
	e := &cliError{err: err, code: exitFailed}
	switch t, ok := errors.AsType[*tunnel.Error](err); {
	case !ok || !t.BehindHop:
		e.hint = hint
	case t.Reason == tunnel.DialFailed || t.Reason == tunnel.DialTimeout: // of the service, or of the gateway
		e.hint = "see whether the gateway is reached: culvert doctor"
	}
	return e
}

// carry copies both directions until each has ended, or one has failed. It passes the end of
// each on alone.
func carry(in, out *os.File, c tunnel.Stream) error {
	sent, received := make(chan error, 1), make(chan error, 1)
	go func() { // a read of in may not end before the process does
		_, err := io.Copy(c, in)
		if err == nil {
			err = c.CloseWrite()
		}
		sent <- err
	}()
	go func() {
		_, err := io.Copy(out, c)
		if err == nil { // else the reader of a pipeline would wait for the end of in
			err = out.Close()
		}
		received <- err
	}()
	for sent != nil || received != nil {
		var err error
		select {
		case err = <-sent:
			sent = nil
			var ofInput *fs.PathError
			if err != nil && received != nil && !errors.As(err, &ofInput) {
				return <-received // the service has ended: what it said last is still on its way to out
			}
		case err = <-received:
			received = nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}
