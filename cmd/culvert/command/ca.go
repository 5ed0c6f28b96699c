package command

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"culvert.dev/internal/testca"
)

func newCA() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ca",
		Short: "A small development CA: SPIFFE certificates for workloads",
		Long: `Ca keeps a small certificate authority in a directory and issues certificates
with SPIFFE IDs, to try mutual TLS on one machine. It has one key, one level and
no revocation: do not use it in production.`,
		Example: `  culvert ca init --dir pki --trust-domain example.test
  culvert ca issue --dir pki --id spiffe://example.test/ns/shop/sa/orders --dns orders.example.test
  culvert ca issue --dir pki --id spiffe://example.test/ns/shop/sa/web --name web`,
		Args: subcommand,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newCAInit(), newCAIssue())
	return cmd
}

func newCAInit() *cobra.Command {
	var dir, trustDomain string
	cmd := &cobra.Command{
		Use:     "init",
		Short:   "Create a CA",
		Example: "  culvert ca init --dir pki --trust-domain example.test",
		Args:    args(0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return caInit(cmd.OutOrStdout(), dir, trustDomain)
		},
	}
	cmd.Flags().StringVar(&dir, "dir", "pki", "directory of the CA")
	cmd.Flags().StringVar(&trustDomain, "trust-domain", "example.test", "SPIFFE trust domain")
	return cmd
}

func caInit(w io.Writer, dir, trustDomain string) error {
	if err := testca.CheckTrustDomain(trustDomain); err != nil {
		return usageError("", "--trust-domain: %w", err)
	}
	ca, err := testca.New(trustDomain, nil)
	if err != nil {
		return err
	}
	if err := ca.Save(dir); errors.Is(err, fs.ErrExist) {
		return &cliError{err: err, hint: "choose another --dir, or remove it if nothing it has signed is in use", code: exitFailed}
	} else if err != nil {
		return err
	}
	fmt.Fprintf(w, "created a CA for trust domain %s\n  certificate  %s\n  key          %s (keep it secret)\n",
		trustDomain, filepath.Join(dir, "ca.crt"), filepath.Join(dir, "ca.key"))
	return nil
}

type issueOptions struct {
	dir   string
	name  string
	id    string
	dns   []string
	ips   []net.IP
	ttl   time.Duration
	usage string
}

func newCAIssue() *cobra.Command {
	var o issueOptions
	cmd := &cobra.Command{
		Use:   "issue",
		Short: "Issue a certificate for a workload",
		Example: `  culvert ca issue --id spiffe://example.test/ns/shop/sa/orders --dns orders.example.test
  culvert ca issue --id spiffe://example.test/ns/shop/sa/web --name web --ttl 1h`,
		Args: args(0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error { return caIssue(cmd.OutOrStdout(), &o) },
	}
	f := cmd.Flags()
	f.StringVar(&o.dir, "dir", "pki", "directory of the CA")
	f.StringVar(&o.name, "name", "", "name of the files (default: the last part of the ID)")
	f.StringVar(&o.id, "id", "", "SPIFFE ID, spiffe://TRUST-DOMAIN/PATH")
	f.StringSliceVar(&o.dns, "dns", nil, "DNS names of the workload")
	f.IPSliceVar(&o.ips, "ip", nil, "IP addresses of the workload")
	f.DurationVar(&o.ttl, "ttl", 24*time.Hour, "how long the certificate is valid")
	f.StringVar(&o.usage, "usage", "both", "client, server or both")
	_ = cmd.MarkFlagRequired("id")
	_ = cmd.RegisterFlagCompletionFunc("usage", cobra.FixedCompletions([]string{"client", "server", "both"}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func caIssue(w io.Writer, o *issueOptions) error {
	usage, ok := map[string]testca.Usage{"both": testca.Both, "client": testca.ClientOnly, "server": testca.ServerOnly}[o.usage]
	if !ok {
		return usageError("use client, server or both", "unknown usage %q", o.usage)
	}
	_, path, err := testca.SplitID(o.id)
	if err != nil {
		return usageError("write spiffe://TRUST-DOMAIN/PATH", "--id: %w", err)
	}
	if o.name == "" {
		o.name = filepath.Base(path)
	}
	ca, err := testca.Load(o.dir, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return &cliError{err: err, hint: fmt.Sprintf("make one with \"culvert ca init --dir %s\"", o.dir), code: exitFailed}
	} else if err != nil {
		return err
	}
	pair, err := ca.Issue(testca.Options{SPIFFEID: o.id, DNSNames: o.dns, IPs: o.ips, TTL: o.ttl, Usage: usage})
	if err != nil {
		return err
	}
	if err := pair.Save(o.dir, o.name); err != nil {
		return err
	}
	fmt.Fprintf(w, "issued %s, valid until %s\n  certificate  %s\n  key          %s\n", o.id,
		pair.TLS.Leaf.NotAfter.UTC().Format(time.RFC3339), filepath.Join(o.dir, o.name+".crt"), filepath.Join(o.dir, o.name+".key"))
	return nil
}
