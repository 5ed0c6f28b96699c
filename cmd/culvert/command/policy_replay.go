package command

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"culvert.dev/internal/gateway"
	"culvert.dev/tunnel"
)

func newPolicyDryRun() *cobra.Command {
	var o policyOptions
	cmd := &cobra.Command{
		Use:   "dry-run LOG",
		Short: "Show which requests of an access log policies would decide otherwise",
		Long: `Dry-run reads the lines of an access log, text or JSON, and asks the policies of a
configuration about each request in it: those in dry run as if they were enforced,
too. It shows the requests that were carried and would be denied, and those that
were denied and would be carried. The file "-" is standard input.

The log has no claims of tokens, so that rules with these match nobody here. The
exit code is 1 if a request that was carried would be denied.`,
		Example: `  culvert policy dry-run access.log --config culvert.yaml
  journalctl -u culvert -o cat | culvert policy dry-run - --config new.yaml -o json`,
		Args: args(1, "one LOG"),
		RunE: func(cmd *cobra.Command, a []string) error {
			log := cmd.InOrStdin()
			if a[0] != "-" {
				f, err := os.Open(a[0])
				if err != nil {
					return usageError("", "%w", err)
				}
				defer f.Close()
				log = f
			}
			return runPolicyDryRun(cmd.Context(), cmd.OutOrStdout(), &o, log)
		},
	}
	o.addConfig(cmd)
	return cmd
}

// A replay is what "culvert policy dry-run -o json" prints.
type replay struct {
	Requests int           `json:"requests"` // of the log
	Same     int           `json:"same"`     // would be decided as they were
	Unjudged int           `json:"unjudged"` // lead to no service of the configuration
	Changes  []replayGroup `json:"changes"`
}

// A replayGroup is requests of one caller for one target that a policy would decide
// otherwise.
type replayGroup struct {
	Would    string `json:"would"` // deny or allow
	Policy   string `json:"policy,omitempty"`
	Origin   string `json:"origin,omitempty"`
	Peer     string `json:"peer,omitempty"`
	Source   string `json:"source,omitempty"` // the address, where there is no peer
	Target   string `json:"target"`
	Requests int    `json:"requests"`
}

const (
	maxLogLine      = 1 << 20 // bytes
	maxReplayGroups = 10_000
)

func runPolicyDryRun(ctx context.Context, w io.Writer, o *policyOptions, log io.Reader) error {
	r, err := newRehearsal(ctx, &o.sourceOptions)
	if err != nil {
		return err
	}
	r.lookUpNothing()
	var all replay
	groups := map[replayGroup]int{}
	lines := bufio.NewScanner(log)
	lines.Buffer(nil, maxLogLine)
	for lines.Scan() {
		fields := logFields(lines.Text())
		if fields["target"] == "" || fields["id"] == "" || fields["reason"] == "" {
			continue // no request
		}
		all.Requests++
		switch g, known := r.replay(ctx, fields); {
		case !known:
			all.Unjudged++
		case g.Would == "":
			all.Same++
		case len(groups) == maxReplayGroups && groups[g] == 0:
			g = replayGroup{Would: g.Would, Target: "others"}
			fallthrough
		default:
			groups[g]++
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("reading the log: %w", err)
	}
	if all.Requests == 0 {
		return usageError("the access log has a line for each request, with target and reason", "the log has no requests")
	}
	denies := false
	for g, n := range groups {
		g.Requests = n
		denies = denies || g.Would == "deny"
		all.Changes = append(all.Changes, g)
	}
	slices.SortFunc(all.Changes, func(a, b replayGroup) int {
		return cmp.Or(-cmp.Compare(a.Would, b.Would), cmp.Compare(b.Requests, a.Requests), cmp.Compare(a.Target, b.Target), cmp.Compare(a.Peer, b.Peer), cmp.Compare(a.Source, b.Source))
	})
	if o.output == "json" {
		err = writeJSON(w, &all)
	} else {
		err = printReplay(w, &all)
	}
	if err == nil && denies {
		err = errSilent
	}
	return err
}

func printReplay(w io.Writer, all *replay) error {
	if len(all.Changes) > 0 {
		rows := [][]string{{"WOULD", "REQUESTS", "CALLER", "TARGET", "POLICY"}}
		for _, g := range all.Changes {
			by := "-"
			if g.Policy != "" {
				by = g.Policy + " of " + g.Origin
			}
			rows = append(rows, []string{g.Would, strconv.Itoa(g.Requests), printable(cmp.Or(g.Peer, g.Source, "-")), printable(g.Target), printable(by)})
		}
		if err := writeTable(w, rows, 1); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintf(w, "%d requests: %d decided as they were, %d otherwise, %d for no service of the configuration\n",
		all.Requests, all.Same, all.Requests-all.Same-all.Unjudged, all.Unjudged)
	return err
}

// replay decides about the request of a line of the log. It is false where that leads to no
// service.
func (r *rehearsal) replay(ctx context.Context, fields map[string]string) (g replayGroup, known bool) {
	req := &tunnel.Request{Proto: fields["proto"], Listener: fields["listener"], Peer: tunnel.Peer{ID: fields["peer"], Method: fields["peer_method"]}}
	if p, ok := r.tokens.Account(req.Peer.ID); ok && req.Peer.Method == p.Method {
		req.Peer = p
	}
	req.Peer = gateway.WithStatedActor(req.Peer, tunnel.Peer{ID: fields["actor"], Method: fields["actor_method"]})
	req.Source, _ = netip.ParseAddrPort(fields["source"])
	if _, port, err := net.SplitHostPort(req.Listener); err == nil {
		n, _ := strconv.ParseUint(port, 10, 16)
		req.LocalPort = uint16(n)
	}
	host := fields["target"]
	if h, port, err := net.SplitHostPort(host); err == nil {
		n, _ := strconv.ParseUint(port, 10, 16)
		host, req.Port = h, uint16(n)
	}
	var err error
	if req.Addr, err = netip.ParseAddr(host); err != nil {
		if req.Name, err = tunnel.ParseName(host); err != nil {
			return g, false
		}
	}
	route, err := r.registry.Resolve(ctx, req)
	var refusal *tunnel.Error
	if errors.As(err, &refusal) && refusal.Reason == tunnel.NoRoute {
		return g, false
	}
	allowed, by := err == nil || refusal != nil && refusal.Reason != tunnel.Denied && refusal.Reason != tunnel.NotExposed, route.Policy
	if by != nil && by.DryRun != nil && (refusal == nil || refusal.Reason == tunnel.Denied) {
		by = by.DryRun
		allowed = by.Allowed
	}
	was := !slices.Contains([]tunnel.Reason{tunnel.Denied, tunnel.NotExposed}, tunnel.Reason(fields["reason"]))
	if allowed == was {
		return g, true
	}
	g = replayGroup{Would: "deny", Peer: req.Peer.ID, Target: fields["target"]}
	if allowed {
		g.Would = "allow"
	}
	if g.Peer == "" && req.Source.IsValid() {
		g.Source = req.Source.Addr().String()
	}
	if by != nil {
		g.Policy, g.Origin = by.Policy, by.Origin
	}
	return g, true
}

// logFields returns the fields of a line of the log: JSON, or key=value.
func logFields(line string) map[string]string {
	fields := map[string]string{}
	if strings.HasPrefix(line, "{") {
		var all map[string]any
		dec := json.NewDecoder(strings.NewReader(line))
		dec.UseNumber()
		if dec.Decode(&all) != nil {
			return nil
		}
		for k, v := range all {
			if _, isList := v.([]any); !isList {
				fields[k] = fmt.Sprint(v)
			}
		}
		return fields
	}
	for line != "" {
		key, rest, ok := strings.Cut(strings.TrimLeft(line, " "), "=")
		if !ok {
			break
		}
		value := rest
		if quoted, err := strconv.QuotedPrefix(rest); err == nil {
			value, _ = strconv.Unquote(quoted)
			line = rest[len(quoted):]
		} else {
			value, line, _ = strings.Cut(rest, " ")
		}
		fields[key[strings.LastIndexByte(key, ' ')+1:]] = value
	}
	return fields
}
