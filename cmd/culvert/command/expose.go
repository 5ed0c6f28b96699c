package command

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"culvert.dev/internal/admin"
	"culvert.dev/internal/gateway"
	"culvert.dev/registry"
	"culvert.dev/registry/file"
	"culvert.dev/tunnel"
)

// exposeProtocols are the carriers of a session.
var exposeProtocols = []string{"connect", "connect-h2", "connect-h3", "websocket", "hbone"}

type exposeOptions struct {
	gatewayAccess
	name     string // NAME[:PORT]
	to       string
	via      []string
	allow    []string
	protocol string
	logLevel string
	output   string
}

func newExpose() *cobra.Command {
	var o exposeOptions
	cmd := &cobra.Command{
		Use:   "expose NAME[:PORT]",
		Short: "Give a service on this machine a name on gateways",
		Long: `Expose gives a service on this machine, or near it, a name on one or more gateways.
The service need not accept connections from outside. Expose opens a reverse session
to each gateway, registers the name, and passes the connections of clients on to the
service, without decrypting them. It prints how to reach the service, and then its
state, until it is interrupted. No port has to be open on this machine.

A gateway lets a caller register a name only by a policy with the verb "register".
It knows the caller by the certificate or the token. The exit code is 1 if no
gateway accepts the name. A gateway that cannot be reached is tried again.

After culvert join, neither --via nor --cert is needed: the gateway and the identity
are those that the device has from there, and its certificate is renewed.

It is "reverse" of the configuration file in one command. For a server that
exposes names all the time, use "culvert gateway" with a file.`,
		Example: `  culvert expose cam.edge.example --to 127.0.0.1:8443
  culvert expose cam.edge.example --to 127.0.0.1:8443 --via gw1.example --cert me.pem --key me.key --ca ca.pem
  culvert expose cam.edge.example --to 127.0.0.1:8443 --via gw1.example --via gw2.example --cert me.pem
  culvert expose cam.edge.example --to 127.0.0.1:8443 --via gw1.example --cert me.pem --allow spiffe://corp.example/ns/web/sa/client
  culvert expose db.edge.example:5432 --to db.lan:5432 --via gw1.example:8443 --token-file token -o json`,
		Args:              args(1, "one NAME[:PORT]"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, a []string) error {
			o.name = a[0]
			ctx, stop, now := signals(cmd.Context())
			defer stop()
			return runExpose(ctx, now, cmd.OutOrStdout(), cmd.ErrOrStderr(), &o)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.to, "to", "", "`HOST:PORT` of the service")
	f.StringArrayVar(&o.via, "via", nil, "`HOST[:PORT]` of a gateway (default port: 443); repeatable")
	f.StringArrayVar(&o.allow, "allow", nil, "`ID` of a caller that may connect, a SPIFFE ID or a user; repeatable (default: the gateway's policies decide)")
	o.add(cmd, "via", "gateway-id")
	f.StringVar(&o.protocol, "protocol", "", "how to ask the gateways: "+oneOf(exposeProtocols)+" (default: connect, or what the token of culvert join says)")
	f.StringVar(&o.logLevel, "log-level", "", "also log to standard error: debug, info, warn or error (default: no log)")
	for _, name := range []string{"to", "via", "allow"} {
		_ = cmd.RegisterFlagCompletionFunc(name, cobra.NoFileCompletions)
	}
	_ = cmd.RegisterFlagCompletionFunc("protocol", cobra.FixedCompletions(exposeProtocols, cobra.ShellCompDirectiveNoFileComp))
	_ = cmd.RegisterFlagCompletionFunc("log-level", cobra.FixedCompletions([]string{"debug", "info", "warn", "error"}, cobra.ShellCompDirectiveNoFileComp))
	addOutput(cmd, &o.output)
	return cmd
}

// check finds mistakes in the flags, and sets the defaults.
func (o *exposeOptions) check() error {
	if err := o.useJoined(); err != nil {
		return err
	}
	switch {
	case o.to == "":
		return usageError("add --to HOST:PORT, the address of the service", "--to is missing")
	case len(o.via) > 0:
	case o.joined == nil:
		return usageError("add --via HOST[:PORT], the address of a gateway, or run culvert join with a token of it first", "no gateway is named, and this machine has not joined one")
	default:
		o.via = []string{o.joined.Gateway}
	}
	if err := o.gatewayAccess.check(); err != nil {
		return err
	}
	if o.protocol == "hbone" && o.serverName != "" {
		return usageError("use --gateway-id", "--server-name has no effect: clients of hbone send no name")
	}
	if host, port, err := net.SplitHostPort(o.name); err == nil && host != "" {
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return usageError("it is a number from 1 to 65535; leave it out for any port", "%q: %q is not a port", o.name, port)
		}
	}
	if name, _ := o.split(); name != "" {
		if _, err := tunnel.ParsePattern(name); err != nil {
			return usageError("", "%q is not a name to expose: %w", name, err)
		}
	}
	if strings.HasPrefix(o.to, "unix:") || strings.HasPrefix(o.to, "/") {
		return usageError("have it listen on loopback, too, and write HOST:PORT", "--to %q: a service at a Unix socket can't be exposed", o.to)
	}
	host, port, err := net.SplitHostPort(o.to)
	if err != nil {
		return usageError("write HOST:PORT", "--to %q: %w", o.to, err)
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return usageError("it is a number from 1 to 65535", "--to %q: %q is not a port", o.to, port)
	}
	if host == "" {
		return usageError("write HOST:PORT, as in 127.0.0.1:"+port, "--to %q has no host", o.to)
	}
	for i, via := range o.via {
		if host, _, _ := net.SplitHostPort(withPort(via, "443")); host == "" {
			return usageError("write HOST[:PORT]", "--via %q is not the address of a gateway", via)
		}
		o.via[i] = withPort(via, "443")
	}
	if o.protocol == "" && o.joined != nil {
		o.protocol = o.joined.Transport
	}
	if o.protocol == "" {
		o.protocol = "connect"
	}
	return nil
}

// split returns the name and the port of o.name, 0 for none.
func (o *exposeOptions) split() (string, int) {
	if host, port, err := net.SplitHostPort(o.name); err == nil {
		if n, err := strconv.ParseUint(port, 10, 16); err == nil && n > 0 {
			return host, int(n)
		}
	}
	return o.name, 0
}

// load makes a file with "reverse" of the flags, and returns its configuration. The parser of files
// checks the rest.
func (o *exposeOptions) load() (*file.Config, error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	name, port := o.split()
	exposed := map[string]any{"name": name, "to": o.to}
	if port > 0 {
		exposed["port"] = port
	}
	if len(o.allow) > 0 {
		exposed["allow"] = o.allow
	}
	reverse := map[string]any{"to": o.via, "protocol": o.protocol, "expose": []any{exposed}}
	for key, value := range map[string]string{"certificateFile": o.cert, "keyFile": o.key, "caFile": o.ca, "tokenFile": o.token, "serverName": o.serverName} {
		if value != "" {
			reverse[key] = value
		}
	}
	if len(o.peers) > 0 {
		reverse["peers"] = o.peers
	}
	config := map[string]any{"reverse": reverse}
	if m := o.joined; m != nil {
		reverse["key"], reverse["trust"], reverse["peers"] = joinedKey, m.TrustDomain, []string{m.GatewayID}
		config["identity"] = joinedIdentity(m, o.state)
	}
	return loadFlags(config)
}

// usageOrNil is usage for an error that may be nil.
func usageOrNil(err error) error {
	if err == nil {
		return nil
	}
	return usage(err)
}

// runExpose serves until ctx is done, then drains; a close of now ends the drain at once. It
// returns an error as soon as no gateway will ever take the name.
func runExpose(ctx context.Context, now <-chan struct{}, stdout, stderr io.Writer, o *exposeOptions) error {
	c, err := o.load()
	if err != nil {
		return err
	}
	log := slog.New(slog.DiscardHandler)
	if o.logLevel != "" {
		var level slog.Level
		if err := level.UnmarshalText([]byte(o.logLevel)); err != nil {
			return usageError("use debug, info, warn or error", "--log-level %q", o.logLevel)
		}
		log = slog.New(admin.NewHandler(stderr, false, level))
	}
	x := newExposing(stdout, o)
	g, ids, err := inProcess(ctx, c, log, func(cfg *gateway.Config) { cfg.Observe = x.observe })
	if err != nil {
		return err
	}
	defer ids.close()
	x.own = ids.store.Entries
	if o.joined == nil { // whose files are watched as those of "identity"
		own, used := &credentials{store: ids.store, log: log}, c.Credentials
		own.use(used)
		x.renew = func() { used = o.renew(own, used) }
	}
	running, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	ran := make(chan error, 1)
	go func() { ran <- g.Run(running, now) }()
	x.begin()
	refused := x.follow(ctx, g, ran, func() { stop(gateway.ErrInterrupted) })
	x.end()
	return refused
}

// renew takes up the files of the credentials if they have changed, and returns what own has then. Of
// files that can't be used, such as a certificate whose key is not written yet, nothing is taken.
func (o *exposeOptions) renew(own *credentials, used file.Credentials) file.Credentials {
	c, err := o.load()
	if err != nil {
		own.log.Warn("cannot read the credentials again", "error", err.Error())
		return used
	}
	if !reflect.DeepEqual(c.Credentials, used) {
		own.use(c.Credentials)
		own.log.Info("credentials changed")
	}
	return c.Credentials
}

// inProcess returns a gateway of c that serves no listener, for a command that runs it for
// itself, and its keys, which the caller closes. adapt, if it is not nil, changes what New takes.
func inProcess(ctx context.Context, c *file.Config, log *slog.Logger, adapt func(*gateway.Config)) (*gateway.Gateway, *identities, error) {
	cfg, err := gatewayConfig(c)
	if err != nil {
		return nil, nil, err
	}
	ids, err := newIdentities(ctx, c.Identity, cfg.Sockets, log)
	if err != nil {
		return nil, nil, err
	}
	(&credentials{store: ids.store, log: log}).use(c.Credentials)
	cfg.Log, cfg.Identity, cfg.JWTSVID = log, ids.store, ids.jwtSVID
	cfg.DrainDelay = -1 // there is no listener for which clients have to find another one first
	cfg.Sources = []registry.Source{registry.Static{Name: "flags", Snapshot: c.Snapshot()}}
	if adapt != nil {
		adapt(&cfg)
	}
	g, err := gateway.New(ctx, cfg)
	if err != nil {
		ids.close()
		return nil, nil, err
	}
	return g, ids, nil
}

// follow reports on g until it has stopped. If no gateway will ever accept the name, it calls stop
// and returns why.
func (x *exposing) follow(ctx context.Context, g *gateway.Gateway, ran <-chan error, stop func()) (refused error) {
	tick := newExposeTick()
	defer tick.Stop()
	interrupted := ctx.Done()
	for {
		select {
		case err := <-ran:
			return errors.Join(refused, err)
		case <-interrupted:
			interrupted = nil
			x.event(exposeEvent{Event: "draining"}, "stopping when the open streams have ended; interrupt again to stop at once")
		case <-tick.C:
			in, out := g.Carried()
			sessions := g.ReverseSessions()
			if interrupted == nil || refused != nil {
				continue
			}
			if x.renew != nil && time.Since(x.renewed) >= renewEvery {
				x.renewed = time.Now()
				x.renew()
			}
			if refused = x.look(sessions); refused != nil {
				stop()
				continue
			}
			x.progress(sessions, in, out)
		}
	}
}
