"""Offline batches: a file of prompts to a file of records.

A line's way, in the order of the modules:

    job                      `run_batch`: checks paths and options, then scan, run, output, report
    formats/source           reads lines: plain, gzip, zstd, parquet, standard input
    formats/line_format      parses a line and formats its record, in either of two formats:
        plain_lines, openai_batch; `record` has the values both share, `strict_json` the JSON rules
    scan                     parses, tokenises and checks all lines, and puts the result on disk
        reading, known_lines in the file's order: a thread reads, while lines that are known run
    run                      plans an order, submits requests to the runtime, collects its outputs
        lanes, dispatch      hands pieces out to a Runtime or to replicas; which replica runs which
        parts                prompts whose answers run as several requests
        retry, suspects      lines of a failed pass, and pieces that may kill a process, run apart
        meter                throughput figures and progress bars
    record_writer            one record for each output or error, counted
        error_limit, tally   stops a batch with too many errors; counts of records
    journal                  takes the records:
        journal, journal_format, manifest    a file that survives a kill, and what it belongs to
        late_journal                         one that begins once that is known
        standard_output, waiting_lines       or standard output, in input order
    journal/run_folder       `OUTPUT.run`: its lock (`run_lock`), and the output made of the journal
        formats/compression  compresses the output according to its name
    radixrt.report           figures, pages and plots of the finished batch
"""
