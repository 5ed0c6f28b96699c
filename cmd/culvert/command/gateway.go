package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math"
	"net"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"culvert.dev/internal/activation"
	"culvert.dev/internal/admin"
	"culvert.dev/internal/background"
	"culvert.dev/internal/gateway"
	"culvert.dev/nat/upnp"
	"culvert.dev/registry/file"
)

type gatewayOptions struct {
	sourceOptions
	logFormat    string
	logLevel     string
	adminControl bool
	health       string
	memory       string
	onlyDNS      bool
}

func newGateway() *cobra.Command {
	var o gatewayOptions
	cmd := &cobra.Command{
		Use:   "gateway",
		Short: "Run a gateway",
		Long: `Gateway accepts TLS and HTTP CONNECT on the same port, finds the service by the
name that the client asks for, and passes the bytes through without decrypting
them.

Its services are listed in a configuration file, or in flags. The file is read
again when it changes and on SIGHUP; a file with a mistake changes nothing. The
first SIGTERM drains: the gateway is not ready from then on, then accepts no new
connections, and aborts the remaining ones at the end of the drain's timeout. A
second SIGTERM ends it at once.`,
		Example: `  culvert gateway --listen :443 --route orders.example.com=10.0.1.7:8443
  culvert gateway --listen :443 --listen 127.0.0.1:3128 --routes routes.txt --admin unix:/run/culvert/admin.sock
  culvert gateway --config culvert.yaml`,
		Args: args(0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop, now := signals(cmd.Context())
			defer stop()
			return runGateway(ctx, now, cmd.ErrOrStderr(), &o)
		},
	}
	o.add(cmd)
	cmd.Flags().BoolVar(&o.adminControl, "admin-control", false, "let the admin port close tunnels over TCP; a Unix socket always may")
	o.addRuntime(cmd)
	return cmd
}

// addRuntime adds the flags of a process that serves.
func (o *gatewayOptions) addRuntime(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&o.logFormat, "log-format", "", "text or json (default: the file's, or text)")
	f.StringVar(&o.logLevel, "log-level", "", "debug, info, warn or error (default: the file's, or info)")
	f.StringVar(&o.health, "health", "", "address of the health port: /healthz, /readyz and /metrics alone, for probes from other hosts")
	f.StringVar(&o.memory, "memory-limit", "", "auto, none, or a size such as 512MiB (default: the file's, or auto)")
	_ = cmd.RegisterFlagCompletionFunc("log-format", cobra.FixedCompletions([]string{"text", "json"}, cobra.ShellCompDirectiveNoFileComp))
	_ = cmd.RegisterFlagCompletionFunc("log-level", cobra.FixedCompletions([]string{"debug", "info", "warn", "error"}, cobra.ShellCompDirectiveNoFileComp))
}

// runGateway serves until ctx is done and then drains; a close of now ends
// the drain at once.
func runGateway(ctx context.Context, now <-chan struct{}, stderr io.Writer, o *gatewayOptions) error {
	passed := activation.FromEnvironment() // before there are goroutines, and commands for tokens
	c, err := o.load()
	if err != nil {
		return err
	}
	if o.onlyDNS && c.DNS == nil {
		return usageError("add dns: {listen: [\"udp://:53\", \"tcp://:53\"]} to the file", "nothing to answer by DNS")
	}
	o.override(c)
	if len(c.Listeners) == 0 && c.ServicePorts == nil && c.DNS == nil && !c.Listens() && c.Reverse == nil {
		return usageError("add \"listeners:\" to the file, or --listen ADDR", "no listener")
	}
	// A log nobody reads must not stop a tunnel, be its reader slow or gone.
	outliveReaders()
	out := admin.NewAsyncWriter(stderr)
	defer func() {
		flush, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = out.Close(flush)
	}()
	output, err := o.logOutput(out, c)
	if err != nil {
		return err
	}
	log := slog.New(output.handler)
	cfg, err := gatewayConfig(c)
	if err != nil {
		return err
	}
	useSockets(c, &cfg)
	cfg.Inherited = passed
	if err := o.limitMemory(c, &cfg); err != nil {
		return err
	}
	cfg.Log, cfg.Health = log, o.health
	cfg.DroppedLogLines = func() float64 { return float64(out.Dropped()) }
	sources, followed := o.sources(c, log)
	logKube(log)
	k8s, err := newKube(c, cfg.Sockets, log)
	if err != nil {
		return err
	}
	catalogs := &laterSource{}
	if followed == nil && c.Agent != nil { // else the file brings it, behind Kubernetes
		sources = append(sources, catalogs)
	}
	current := &kubeSources{}
	current.use(c, k8s)
	cfg.Sources, cfg.SourcesListen = sources, c.Listens()
	current.configure(&cfg)
	ids, err := newIdentities(ctx, c.Identity, cfg.Sockets, log)
	if err != nil {
		return stateError(listenError(err))
	}
	defer ids.close()
	cfg.Identity, cfg.JWTSVID = ids.store, ids.jwtSVID
	cfg.FindUPnP, cfg.NATSecret = (&upnp.Finder{Control: cfg.Sockets.Control}).Find, natSecret()
	own := &credentials{store: ids.store, log: log}
	own.use(c.Credentials)
	cfg.IdentitySources = func() any {
		if s := ids.status(); s != nil {
			return s
		}
		return nil
	}
	ofKube := cfg.Metrics
	cfg.Metrics = func(add addGauges) {
		if ofKube != nil {
			ofKube(add)
		}
		ids.metrics(add)
	}
	cfg.Loops = spareProcessor()
	cfg.Serving = func() { notify(notifyReady) }
	captured, err := newAgentCapture(ctx, c, &cfg, log)
	if err != nil {
		return err
	}
	defer captured.close()
	resolver := &hostDNS{log: log, changed: make(chan struct{}, 1)}
	cfg.OnTable = resolver.onTable(cfg.OnTable)
	g, err := gateway.New(ctx, cfg)
	if err != nil {
		return stateError(listenError(dnsError(err)))
	}
	catalogs.Source = g.Peers()
	stopCapture, err := captured.start(ctx, g)
	if err != nil {
		g.Close()
		return err
	}
	defer stopCapture()
	defer resolver.close()
	if err := resolver.use(ctx, c); err != nil {
		g.Close()
		return hostDNSError(err)
	}
	defer resolver.follow(ctx, g.Table)()
	if followed != nil {
		r := &reloader{o: o, log: log, output: output, kube: current, ids: ids, own: own, capture: captured, resolver: resolver}
		r.follow(ctx, g, followed, c, cfg)
		defer onHangup(func() {
			notify(notifyReloading)
			r.asked.Store(true)
			followed.Reload()
		})()
	}
	defer context.AfterFunc(ctx, func() { notify(notifyStopping) })()
	return g.Run(ctx, now)
}

// spareProcessor has Go use a processor more than there are, and returns how
// many there are. Event loops sleep in the kernel, and while they do so with
// all the processors Go has, its monitor looks every 20 us whether somebody
// else wants one: 5 % of the CPU time of new connections. A long computation,
// such as a reload, gets one more while it lasts, so that this one remains for
// the goroutines of connections.
func spareProcessor() int {
	n := runtime.GOMAXPROCS(0)
	runtime.GOMAXPROCS(n + 1)
	background.UseExtraProcessor()
	return n
}

// override puts the flags in the place of what c says, and takes out what a DNS server
// without a gateway does not do.
func (o *gatewayOptions) override(c *file.Config) {
	if o.admin != "" {
		c.Admin = o.admin
	}
	o.setZone(c)
	c.Control = c.Control || o.adminControl
	if o.onlyDNS {
		c.Listeners, c.ServicePorts, c.Reverse = nil, nil, nil
		answersOnly(c)
	}
}

// limitMemory tells the Go runtime what to keep below, and the gateway what it
// was told. GOMEMLIMIT, which the runtime has read by itself, goes before
// everything else and is not moved; nor is GOGC.
func (o *gatewayOptions) limitMemory(c *file.Config, cfg *gateway.Config) (err error) {
	if os.Getenv("GOGC") == "" {
		cfg.SetGCPercent = func(percent int) { debug.SetGCPercent(percent) }
	}
	if cfg.Memory, err = o.memoryLimit(c); err != nil || os.Getenv("GOMEMLIMIT") != "" {
		return err
	}
	cfg.SetMemory = func(n int64) {
		if n <= 0 {
			n = math.MaxInt64
		}
		debug.SetMemoryLimit(n)
	}
	if cfg.Memory > 0 {
		cfg.SetMemory(cfg.Memory)
	}
	return nil
}

// memoryLimit returns what the runtime is to keep below by the flags, the environment
// and c, as gateway.Config.Memory.
func (o *gatewayOptions) memoryLimit(c *file.Config) (int64, error) {
	memory := c.Limits.Memory
	if o.memory != "" {
		var err error
		if memory, err = file.ParseMemory(o.memory); err != nil {
			return 0, usageError("use auto, none or a size", "--memory-limit: %w", err)
		}
	}
	switch {
	case os.Getenv("GOMEMLIMIT") != "":
		if limit := debug.SetMemoryLimit(-1); limit < math.MaxInt64 { // "off" is that
			return limit, nil
		}
		return 0, nil
	case memory == 0:
		return gateway.AutoMemory(), nil
	}
	return int64(memory), nil
}

// expiries are the certificates of c's files, for the gateway to say when they
// expire.
func expiries(c *file.Config) []gateway.Certificate {
	list := make([]gateway.Certificate, len(c.Certificates))
	for i, e := range c.Certificates {
		list[i] = gateway.Certificate(e)
	}
	return list
}

// onHangup calls f on every SIGHUP until the returned function is called.
func onHangup(f func()) (stop func()) {
	got := make(chan os.Signal, 1)
	signal.Notify(got, hangup)
	quit, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-got:
				f()
			case <-quit:
				return
			}
		}
	}()
	return func() {
		signal.Stop(got)
		close(quit)
		<-ended
	}
}

// A logOutput is where the log goes, whose level and format may change.
type logOutput struct {
	handler *admin.Handler
	level   *slog.LevelVar
}

// logOutput makes the log that the flags and the file ask for.
func (o *gatewayOptions) logOutput(w io.Writer, c *file.Config) (*logOutput, error) {
	level, asJSON, err := o.logSettings(c)
	if err != nil {
		return nil, err
	}
	out := &logOutput{level: new(slog.LevelVar)}
	out.level.Set(level)
	out.handler = admin.NewHandler(w, asJSON, out.level)
	return out, nil
}

// use has the log follow c, as far as no flag goes before it.
func (out *logOutput) use(o *gatewayOptions, c *file.Config) {
	if level, asJSON, err := o.logSettings(c); err == nil { // of which the flags are what they were
		out.level.Set(level)
		out.handler.SetJSON(asJSON)
	}
}

// logSettings returns the level and the format that the flags and the file ask for.
func (o *gatewayOptions) logSettings(c *file.Config) (level slog.Level, asJSON bool, err error) {
	level, format := c.Log.Level, c.Log.Format
	if o.logLevel != "" {
		if err := level.UnmarshalText([]byte(o.logLevel)); err != nil {
			return level, false, usageError("use debug, info, warn or error", "--log-level %q", o.logLevel)
		}
	}
	if o.logFormat != "" {
		format = o.logFormat
	}
	if format != "json" && format != "text" {
		return level, false, usageError("use text or json", "--log-format %q", format)
	}
	return level, format == "json", nil
}

// listenError adds to an error of a listener what to do about it.
func listenError(err error) error {
	var oe *net.OpError
	if _, known := errors.AsType[*cliError](err); known || !errors.As(err, &oe) || oe.Op != "listen" || oe.Addr == nil {
		return err
	}
	_, port, splitErr := net.SplitHostPort(oe.Addr.String())
	if splitErr != nil {
		return err
	}
	flags, hint := "-ltnp", ""
	if strings.HasPrefix(oe.Net, "udp") {
		flags = "-lunp"
	}
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		hint = fmt.Sprintf("find who has it with: ss %s 'sport = :%s'", flags, port)
	case errors.Is(err, fs.ErrPermission):
		hint = "ports below 1024 need root or CAP_NET_BIND_SERVICE; sudo setcap cap_net_bind_service=+ep culvert, or use :8443"
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		hint = fmt.Sprintf("this machine does not have the address; write \":%s\" for all of them", port)
	default:
		return err
	}
	return &cliError{err: err, hint: hint, code: exitFailed}
}
